"""The samples of a plan in the order in which it reads them: a record batch a micro-batch, one range a read.

``open_dataset`` opens them like any other data set; `packer.shards.materialize` writes them and
`packer.shards.verify` holds them against plan and source.
"""

from packer.shards.dataset import ShardDataset
from packer.shards.opening import open_dataset

__all__ = ["ShardDataset", "open_dataset"]
