"""A refunds processor on Spark, exactly once: each cancelled line becomes one refund and one entry in the audit.

Copy this file to begin a job of your own; `scripts/demo` runs it, kills it and runs it again.  It needs
`pip install txnstore[spark]`, and `txnstore[spark-java]` where there is no Java.

    TXNSTORE_URL=sqlite:///shop.db python refunds.py checkpoint-folder
"""

from __future__ import annotations

import argparse
import os

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from txnstore.spark.local_spark import local_session

SETTLEMENT = """invoice string, stock_code string, customer_id string, quantity long, unit_price string,
    country string, settled_at string"""


def refunds_of(settlements: DataFrame) -> DataFrame:
    """Return a row for each refund: the settlement's fields, the amount, and where the settlement stands."""
    cancelled = settlements.select(
        "key",
        f.col("partition").alias("source_partition"),
        f.col("offset").alias("source_offset"),
        f.from_json(f.col("value").cast("string"), SETTLEMENT).alias("line"),
    ).where("line.invoice LIKE 'C%'")
    # Decimals stay decimals: 31 digits, 6 of them behind the point, hold every product without rounding.
    amount = -f.col("line.quantity").cast("decimal(12,0)") * f.col("line.unit_price").cast("decimal(18,6)")
    # At least two decimals, and no zeros behind the second.
    shown = f.regexp_replace(amount.cast("string"), r"(\.\d\d\d*?)0*$", "$1")
    return cancelled.select("key", "line.*", shown.alias("amount"), "source_partition", "source_offset")


def as_records(refunds: DataFrame) -> DataFrame:
    """Return the records to write: for each refund, one in each topic."""
    value = f.to_json(
        f.struct(
            "invoice", "stock_code", "customer_id", "quantity", "unit_price", "amount", "country", "settled_at",
            "source_partition", "source_offset",
        ),
        {"ignoreNullFields": "false"},
    )  # fmt: skip
    topics = f.array(f.lit("refunds-emitted"), f.lit("refund-audit"))
    return refunds.select("key", value.alias("value"), f.explode(topics).alias("topic"))


def start(spark: SparkSession, url: str, checkpoint: str, batch: int) -> StreamingQuery:
    """Start the query; it ends when it has read what is there."""
    settlements = (
        spark.readStream.format("txnstore")
        .option("kafka.bootstrap.servers", url)
        .option("subscribe", "settlements")
        .option("startingOffsets", "group")
        # This group's offsets are committed in the very transaction that the records are written in.
        .option("kafka.group.id", "refunds")
        .option("maxOffsetsPerTrigger", batch)
        .load()
    )
    return (
        as_records(refunds_of(settlements))
        .writeStream.format("txnstore")
        .option("kafka.bootstrap.servers", url)
        # Killed at any moment and started again with the same checkpoint, it goes on where it was: nothing is
        # written twice or left out.
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)  # .trigger(processingTime="1 second") goes on for ever
        .start()
    )


def main() -> None:
    """Run the query on the database at TXNSTORE_URL."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", help="folder where Spark keeps how far it has come")
    parser.add_argument("--batch", type=int, default=100_000, help="offsets in a micro-batch, at most (100,000)")
    options = parser.parse_args()
    spark = local_session("refunds")
    start(spark, os.environ["TXNSTORE_URL"], options.checkpoint, options.batch).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
