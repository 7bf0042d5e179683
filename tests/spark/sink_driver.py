"""A driver to be killed: `python -m tests.spark.sink_driver FILE` runs the queries that a file of JSON describes.

It holds `folder` (Spark's), `settings` (Spark's) and `queries`: `url`, `checkpoint`, `steps` and `per_batch` of each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.spark.sink_pipeline import start
from tests.spark.sink_steps import SteppedDataSource, Steps
from txnstore.spark.local_spark import local_session


def main(description: Path) -> None:
    """Run the queries side by side until each has read what is there."""
    told = json.loads(description.read_text())
    spark = local_session("driver", folder=Path(told["folder"]), settings=told["settings"])
    spark.dataSource.register(SteppedDataSource)
    queries = [
        start(
            spark,
            query["url"],
            Path(query["checkpoint"]),
            steps=Steps(Path(query["steps"])),
            per_batch=query["per_batch"],
        )
        for query in told["queries"]
    ]
    for query in queries:
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
