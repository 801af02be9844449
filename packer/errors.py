"""The error tree: every way a request or its data can be wrong, each also the fitting builtin.

A message names the culprit, the limit and the cure. The command line prints it as one ``Error:`` line.
"""


class PackerError(Exception):
    """Base of every error that packer raises on purpose."""


class ConfigError(PackerError, ValueError):
    """An option, or a combination of options, that has no meaning (exit code 2)."""


class SourceError(PackerError, ValueError):
    """A data set that cannot be read as asked: damaged, foreign, empty, or of another shape."""


class ColumnError(SourceError, LookupError):
    """A column that is not there, or is not of a type whose lengths can be taken."""


class SourceChangedError(SourceError):
    """The data set is not the one that was analyzed or planned."""


class MetricsError(PackerError, ValueError):
    """A metrics directory, or one of its files, that is damaged, foreign or of another version."""


class PlanError(PackerError, ValueError):
    """A plan directory that is damaged, foreign or of another version, or a request it cannot serve."""


class ShardsError(PackerError, ValueError):
    """Materialised shards that are damaged, foreign, of another version, or of another plan."""


class SampleTooLongError(PackerError, ValueError):
    """A sample that no micro-batch can hold, and no rule that says what to do with it."""


class EmptyPlanError(PackerError, ValueError):
    """A plan in which no step would be left."""


class InvariantError(PlanError):
    """A plan that breaks an invariant; raised by verification."""


class LengthMismatchError(PackerError, ValueError):
    """A sample whose length is not the planned one."""


class StateError(PackerError, ValueError):
    """A saved loader state that belongs to another plan or topology."""


class TargetExistsError(PackerError, FileExistsError):
    """The target is there already, or is not what may be overwritten."""


class TargetBusyError(PackerError, BlockingIOError):
    """Another process is writing the same target."""


class TargetWriteError(PackerError, OSError):
    """The target could not be written: no room, no permission, a read-only place."""


class MissingExtraError(PackerError, ImportError):
    """An optional dependency that is not installed; the message names the extra that brings it."""


class PackerWarning(UserWarning):
    """What works, but costs more than it has to; says how much, and the cure."""


class WorkerLostError(PackerError, RuntimeError):
    """A worker process, or a node, died in the middle of its work."""
