"""A driver to be killed: `python -m tests.spark.sink_driver FILE` runs the queries that a file of JSON describes.

It holds `folder` (Spark's), `settings` (Spark's) and `queries`: `url`, `checkpoint`, `steps` and `per_batch` of each,
and of some `waits_at`: the next one is started when it waits there, or has ended.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.spark.sink_pipeline import start
from tests.spark.sink_steps import SteppedDataSource, Steps
from txnstore.spark.local_spark import local_session

LOOK_SECONDS = 0.1


def main(description: Path) -> None:
    """Run the queries until each has read what is there."""
    told = json.loads(description.read_text())
    # What the driver says that its Python is, Spark starts to look for data sources and to plan.
    sys.executable = os.environ["PYSPARK_PYTHON"]
    spark = local_session("driver", folder=Path(told["folder"]), settings=told["settings"])
    spark.dataSource.register(SteppedDataSource)
    queries = []
    for query in told["queries"]:
        steps = Steps(Path(query["steps"]))
        checkpoint, per_batch = Path(query["checkpoint"]), query["per_batch"]
        queries.append(start(spark, query["url"], checkpoint, steps=steps, per_batch=per_batch))
        if "waits_at" in query:
            while query["waits_at"] not in steps.taken() and not queries[-1].awaitTermination(LOOK_SECONDS):
                pass
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
