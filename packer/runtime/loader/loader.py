"""The loader: replays a plan, step by step, on one rank."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from packer.errors import ConfigError, PlanError
from packer.plan import Epoch, Plan, load_plan
from packer.runtime.batches.batch import Batch, StepInfo
from packer.runtime.batches.collate import Collator
from packer.runtime.batches.fields import INPUT_IDS, Fields, Sample
from packer.runtime.batches.pairs import packed_members
from packer.runtime.batches.segments import Segments
from packer.runtime.batches.sources import dataset_of
from packer.runtime.loader.device import to_device
from packer.runtime.loader.labels import LabelCheck
from packer.runtime.loader.order import LargestFirst, open_epoch, require_free_order
from packer.runtime.loader.prefetch import Schedule, read_in_order
from packer.runtime.loader.progress import EpochStream, Place, Progress
from packer.runtime.loader.randomness import Randomness
from packer.runtime.loader.reader import MicroBatchReader, Slicing, UserCollate
from packer.runtime.loader.rereading import warn_of_rereading
from packer.runtime.loader.state import VERSION, LoaderState, Resume
from packer.runtime.loader.step import Step
from packer.runtime.sequence_parallel.shard import Shard, require_divisible
from packer.runtime.topology import find_coordinates, grad_accum_for
from packer.wording import counted


class PlanLoader:
    """Steps of a plan for one rank; each step hands out this rank's micro-batches.

    An iterator plays one epoch, the next iteration plays the next one. The loader never communicates: every
    rank opens the same plan and finds its own micro-batches in it, also where the plan was made for another
    ``dp_size`` × ``grad_accum`` with the same product.

    The position advances when a micro-batch is handed out, never when it is prefetched, so that
    ``state_dict()`` is exact at any moment. Taken after a step's last micro-batch, while the loop over the
    step still runs, it still stands within the step; once that loop has ended, at the next step.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        dataset: Any,
        *,
        dp_rank: int | None = None,
        dp_size: int | None = None,
        sp_rank: int | None = None,
        sp_size: int = 1,
        pp_rank: int | None = None,
        pp_size: int = 1,
        tp_size: int = 1,
        mesh: DeviceMesh | None = None,
        shard: Shard = "contiguous",
        ragged: bool = False,
        largest_first: bool = False,
        pad_cu_seqlens: bool | int = False,
        device: torch.device | str | int | None = None,
        pad_values: Mapping[str, float] | None = None,
        token_fields: Collection[str] | None = None,
        length_field: str | Mapping[str, str] | None = None,
        sample_padding_fn: Callable[[Sample, int], Sample] | None = None,
        collate: UserCollate | None = None,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        prefetch_factor: int | None = None,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
    ) -> None:
        """Open a plan on one rank.

        Args:
            plan: What ``load_plan`` or ``make_plan`` gave, or the plan's directory.
            dataset: ``dataset[sample_id]`` → mapping with ``input_ids`` and further fields; ``__getitems__``
                and, for cut samples and slices, ``read_slice(sample_id, start, stop)`` are used where
                offered. For a plan of named sources a mapping of such data sets by these names, each with
                ids of its own from 0, or one data set whose ids count through all of them.
            dp_rank: This rank's data-parallel place; with ``dp_size``. Where neither is given, they come
                from ``mesh`` or ``torch.distributed``.
            dp_size: Data-parallel ranks.
            sp_rank: This rank's place in its sequence-parallel group.
            sp_size: Ranks that share a micro-batch.
            pp_rank: This rank's pipeline stage; only the first and the last read samples.
            pp_size: Pipeline stages.
            tp_size: Ranks that have the same batches: those of a tensor-parallel group, or whoever else cuts
                rows behind the loader. dp_size · sp_size · pp_size · tp_size is the number of ranks of a run.
            mesh: A device mesh with named dimensions, instead of all of these.
            shard: How the ranks of a sequence-parallel group share the positions of a row.
            ragged: Their slices may differ in length by one position.
            largest_first: Play the largest step of each epoch first, so that a run that is to fail for want
                of memory fails at once. Steps are then counted as they are played, in the state as well.
            pad_cu_seqlens: Packed layout: give every ``cu_seqlens`` of the plan one length, and every batch
                one ``max_seqlen``, for CUDA graphs. What is missing are segments of no token at T. True: as
                many segments as the plan needs at most; a number: so many.
            device: Where the tensors go; None leaves them in host memory.
            pad_values: Field → what padding holds; 0 where not named. Labels are padded with −100.
            token_fields: Fields with one value a token; default: those whose first dimension is the sample's
                length.
            length_field: What the plan's lengths are counted of, where that is not ``input_ids``: a field
                of features of shape ``(length, …)``, and no ids are needed. Default: what the data set names
                so. Of pairs ``{metric: field}`` for the members that are no ids.
            sample_padding_fn: ``(sample, length)`` → the sample, padded; padded layout only.
            collate: ``(samples, shape)`` → mapping of tensors, instead of our own collation.
            seed: Of the random numbers that the data set or ``collate`` draws; see `Randomness`.
            num_workers: Processes that read ahead; 0 reads in this one.
            pin_memory: Page-locked host memory; default: where the device is a GPU.
            persistent_workers: Keep the processes from one epoch to the next.
            prefetch_factor: Micro-batches that each worker reads ahead.
            multiprocessing_context: ``fork``, ``spawn``, or a context.
            worker_init_fn: Called in each worker with its number.
            timeout: Seconds to wait for a worker; 0 waits for ever.

        Raises:
            ConfigError: The rank is not known, or arguments contradict each other or the running world.
            PlanError: The plan cannot be played on this topology.
            SourceChangedError: The data set, or that of a source, has another number of samples than the plan
                was made for, or was opened with other metrics.
        """
        plan = plan if isinstance(plan, Plan) else load_plan(plan)
        if num_workers < 0:
            raise ConfigError(f"num_workers={num_workers} is negative; 0 reads in this process")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed={seed} is no whole number from 0 to 2^63 − 1; choose one")
        if sample_padding_fn is not None and plan.layout == "packed":
            raise ConfigError("sample_padding_fn has no meaning where samples are packed; leave it out")
        self.plan = plan
        self._at = find_coordinates(
            dp_rank=dp_rank,
            dp_size=dp_size,
            sp_rank=sp_rank,
            sp_size=sp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            tp_size=tp_size,
            mesh=mesh,
        )
        if self._at.sp_size > 1 and (collate is not None or sample_padding_fn is not None):
            raise ConfigError(
                "collate and sample_padding_fn see whole samples, and the ranks of a sequence-parallel group "
                "read slices; leave them out, or give the data set's fields the shape that the model wants"
            )
        self._plans_pairs = isinstance(plan.config.get("max_tokens"), Mapping)
        length_field = length_field or getattr(dataset, "length_field", None) or INPUT_IDS
        _check_length_field(length_field, plan, self._at.sp_size)
        counts_ids = self._plans_pairs or length_field == INPUT_IDS
        self._knows_loss_tokens = not self._plans_pairs and (
            counts_ids or plan.header["loss_tokens"] == "labels"
        )
        if self._at.sp_size > 1 and (self._plans_pairs or packed_members(plan)):
            raise ConfigError("pairs of sequences are not sliced; run their plan with sp_size=1")
        self.grad_accum = grad_accum_for(self._at.dp_size, plan.dp_size, plan.grad_accum)
        """Micro-batches of this rank in a step."""
        require_divisible(plan.config, self._at.sp_size, shard, ragged=ragged)
        dataset = dataset_of(plan, dataset)
        try:
            self.device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"device={device!r} is not known to torch: {error}") from None
        """Where the tensors go."""
        on_gpu = self.device is not None and self.device.type == "cuda"
        definition = plan.definition
        self._randomness = Randomness(plan.fingerprint, seed)
        if largest_first:
            require_free_order(plan)
        self._largest_first = largest_first
        reader = MicroBatchReader(
            plan,
            dataset,
            self._at,
            Collator(
                first_label_counts=self._plans_pairs
                or (bool(definition.get("labels_column")) and not definition.get("shift", True)),
                pad_sample=sample_padding_fn,
            ),
            slicing=Slicing(shard=shard, ragged=ragged),
            fields=Fields(
                length_field=length_field if isinstance(length_field, str) else INPUT_IDS,
                token_fields=token_fields,
                pad_values=pad_values,
            ),
            length_fields=length_field if isinstance(length_field, Mapping) else None,
            randomness=self._randomness,
            user_collate=collate,
            segments=Segments.of(plan, pad_cu_seqlens) if pad_cu_seqlens else None,
            largest_first=largest_first,
        )
        warn_of_rereading(plan, dataset, self._at, max(num_workers, 1))
        self._reader = reader
        self._schedule = Schedule(self.grad_accum)
        self._source = read_in_order(
            reader,
            self._schedule,
            num_workers=num_workers,
            pin_memory=on_gpu if pin_memory is None else pin_memory,
            persistent_workers=persistent_workers,
            seed=int(plan.fingerprint[:8], 16) + self._at.dp_rank,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
        )
        self._progress = Progress(plan)
        self._is_closed = False

    @property
    def dp_rank(self) -> int:
        """This rank's data-parallel place."""
        return self._at.dp_rank

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self._at.dp_size

    @property
    def sp_rank(self) -> int:
        """This rank's place among those that share a micro-batch."""
        return self._at.sp_rank

    @property
    def sp_size(self) -> int:
        """Ranks that share a micro-batch."""
        return self._at.sp_size

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration plays, or goes on with after ``load_state_dict``."""
        return self._progress.next_start.epoch

    @property
    def current_step(self) -> StepInfo:
        """The step being executed: that of the micro-batch handed out last, or the first one to come."""
        if self._progress.step is not None:
            return self._progress.step
        epoch, step, _ = self._progress.next_start
        if epoch == self.plan.num_epochs:  # all were played, by the run that this one goes on from
            epoch, step = epoch - 1, self._progress.num_steps(epoch - 1) - 1
        return self._step_info(self._open(epoch), epoch, step)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration.

        The epoch that comes next anyhow is left as it is, so that a loop which names every epoch does not
        undo a resume within one.

        Raises:
            PlanError: The plan has no such epoch.
        """
        if epoch == self.epoch:
            return
        self.plan.epoch(epoch)
        self._progress.go_to(Place(epoch, 0, 0))

    def __len__(self) -> int:
        """Return the number of steps of the epoch being played, or of the next one before it starts."""
        epoch = self.epoch if self._progress.playing is None else self._progress.playing
        return self._progress.num_steps(min(epoch, self.plan.num_epochs - 1))

    def __iter__(self) -> Iterator[Step]:
        """Play one epoch, from its beginning or from where ``load_state_dict`` stands.

        When all epochs were played there are no steps: so a script that resumes a finished run just ends.
        ``set_epoch`` plays one again.

        Raises:
            PlanError: The loader was closed.
            WorkerLostError: A worker died while the workers were started.
        """
        if self._is_closed:
            raise PlanError("this loader was closed; make another one to go on")
        start = self._progress.next_start
        if start.epoch >= self.plan.num_epochs:
            return iter(())
        self._schedule.start(start, num_steps=self._progress.num_steps(start.epoch))
        reads = iter(self._source)
        if self.device is not None:
            reads = to_device(reads, self.device)
        return self._steps(EpochStream(self._progress, self._progress.begin(), reads), start)

    def read_row(self, epoch: int, row: int) -> Batch:
        """Read any micro-batch of the plan, whichever rank's it is; this loader's place stays where it is.

        Args:
            epoch: Its epoch.
            row: Its row, (step · grad_accum + accum) · dp_size + dp_rank of the plan; steps are counted as
                this loader plays them.

        Returns:
            The batch on the loader's device; a sequence-parallel rank's is its slice.

        Raises:
            PackerError: What keeps it from being made.
        """
        step, within = divmod(row, self.plan.dp_size * self.plan.grad_accum)
        batch = self._reader.make(Place(epoch, step, within // self.dp_size), row)
        batch.step = self._step_info(self._open(epoch), epoch, step)
        return batch if self.device is None else batch.to(self.device)

    def microbatches(self) -> "FlatView":
        """Return the view that frameworks take: one micro-batch after the other, steps left out."""
        return FlatView(self)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: the same numbers on every rank."""
        return LoaderState(
            version=VERSION,
            fingerprint=self.plan.fingerprint,
            epoch=self._progress.place.epoch,
            step=self._progress.place.step,
            microbatch=self._progress.place.accum,
            dp_size=self.dp_size,
            grad_accum=self.grad_accum,
            seed=self._randomness.seed,
            largest_first=self._largest_first,
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, resume: Resume = "step") -> None:
        """Let the next iteration go on where ``state`` was taken; no sample before that place is read.

        Args:
            state: What ``state_dict`` gave, also on another topology with the same ``dp_size`` ×
                ``grad_accum``.
            resume: ``step``: play an interrupted step again, since its gradients are gone; ``microbatch``: go
                on with the very next micro-batch, on the same topology.

        Raises:
            StateError: The state is damaged, belongs to another plan, or to another topology within a step.
        """
        loaded = LoaderState.from_dict(state)
        epoch, step, accum = loaded.place(
            resume,
            fingerprint=self.plan.fingerprint,
            dp_size=self.dp_size,
            grad_accum=self.grad_accum,
            largest_first=self._largest_first,
        )
        self._progress.resume_at(Place(epoch, step, accum))
        if loaded.seed != self._randomness.seed:
            self._randomness.seed = loaded.seed
            self._source.end()  # workers that were sent the other one

    def close(self) -> None:
        """End the workers, and the iteration that goes on; ``state_dict`` still says where it stood."""
        self._is_closed = True
        self._progress.end()
        self._source.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        epoch, step, accum = self._progress.place
        return (
            f"PlanLoader({self.plan!r}, dp_rank {self.dp_rank} of {self.dp_size}, "
            f"{counted(self.grad_accum, 'micro-batch')} a step, at epoch {epoch}, step {step}, "
            f"micro-batch {accum})"
        )

    def _steps(self, stream: EpochStream, start: Place) -> Iterator[Step]:
        epoch, share = self._open(start.epoch), self._at.share
        for index in range(start.step, epoch.num_steps):
            stream.require_current()
            first = start.accum if index == start.step else 0
            info = self._step_info(epoch, start.epoch, index)
            accums = range(first, self.grad_accum)
            labels = LabelCheck(
                info,
                has_all=share.num_parts == 1 and not first,
                are_counted=self.plan.header["loss_tokens"] == "labels",
                sources=self.plan.sources,
            )
            step = Step(info, accums, stream, share=share, labels=labels)
            yield step
            step.leave()

    def _open(self, epoch: int) -> Epoch | LargestFirst:
        return open_epoch(self.plan, epoch, largest_first=self._largest_first)

    def _step_info(self, rows: Epoch | LargestFirst, epoch: int, step: int) -> StepInfo:
        # The lengths that a plan of pairs counts are the sources', and the loss is over the targets; and of
        # features without labels, nobody knows what predicts what.
        return StepInfo.from_row(epoch, step, rows.step(step), knows_loss_tokens=self._knows_loss_tokens)


def _check_length_field(length_field: str | Mapping[str, str], plan: Plan, sp_size: int) -> None:
    """Refuse a length field that has no meaning for a plan.

    Raises:
        ConfigError: One for pairs, or metrics that the plan has not; or features that are to be sliced.
    """
    budgets = plan.config["max_tokens"]
    if isinstance(length_field, Mapping):
        members = tuple(budgets) if isinstance(budgets, Mapping) else ()
        foreign = [metric for metric in length_field if metric not in members]
        if foreign:
            has = f"has budgets for {', '.join(members)}" if members else "has one budget; name one field"
            raise ConfigError(f"length_field names {foreign[0]}, and the plan {has}")
    elif length_field != INPUT_IDS and isinstance(budgets, Mapping):
        raise ConfigError(
            f"length_field={length_field!r} does not say of which of {', '.join(budgets)}; give a mapping "
            "{metric: field}"
        )
    elif length_field != INPUT_IDS and sp_size > 1:
        raise ConfigError(
            f"slices of rows are of token ids, and this run counts {length_field}; run with sp_size=1"
        )


class FlatView:
    """The micro-batches of a loader one after the other, for frameworks that accumulate gradients themselves.

    Position, epochs and resume are those of the loader, but that a step counts as played when its last
    micro-batch is handed out: the framework saves its state between two updates.
    """

    def __init__(self, loader: PlanLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        """Return the number of this rank's micro-batches in an epoch."""
        return len(self.loader) * self.loader.grad_accum

    def __iter__(self) -> Iterator[Batch]:
        """Play one epoch."""
        for step in self.loader:
            for _ in range(len(step) - 1):
                yield next(step)
            batch = next(step)
            step.leave()
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the very next micro-batch, or, on another topology, with the step."""
        within = (
            state.get("dp_size") == self.loader.dp_size and state.get("grad_accum") == self.loader.grad_accum
        )
        self.loader.load_state_dict(state, resume="microbatch" if within else "step")
