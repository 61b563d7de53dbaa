"""An engine, put together from its settings: checkpoint, runner, cache, scheduler, speculation and guides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.clock import MonotonicClock
from penstock.core.hashing import ROUTING_TOKENS
from penstock.core.measurements import ServingLimits
from penstock.core.ranks import RankLost, RankReading
from penstock.core.settings import EngineSettings, Settings
from penstock.core.speculating import kind_of
from penstock.engine.embedding import EmbedQueue
from penstock.engine.engine import Engine
from penstock.engine.loop import EngineLoop
from penstock.engine.lora import LoraManager
from penstock.engine.mailbox import Disconnected, Mailbox
from penstock.engine.messages import EngineInfo, Loading, RankState
from penstock.engine.step_log import StepLimits, StepLog
from penstock.engine_process.disk import check_disk, open_disk
from penstock.engine_process.encoder import build_encoder
from penstock.engine_process.expert_reports import report_experts
from penstock.engine_process.facts import image_slots, peaks_of, rank_reads, state_slots, weight_bytes, work_of
from penstock.engine_process.guides import make_guides
from penstock.engine_process.parallelism import with_parallelism
from penstock.engine_process.phases import Phases
from penstock.engine_process.recurrent import check_stages, for_recurrent
from penstock.engine_process.speculation import draft_checkpoint, make_speculation
from penstock.engine_process.transfer import make_transfer
from penstock.hub.checkpoint import Checkpoint
from penstock.hub.encoder import EncoderCheckpoint
from penstock.kv.cache import KVCache
from penstock.sched.budget import StepBudget
from penstock.sched.lora import AdapterSlots
from penstock.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.runner.assemble import Assembly


def build(settings: Settings, mailbox: Mailbox, on_lost: Callable[[RankLost], None]) -> tuple[EngineLoop, EngineInfo]:
    """`on_lost`: called in a thread as soon as another rank of the model is gone."""
    phases = Phases("import", lambda name, done, total: mailbox.send(Loading(name, done, total)))
    # Torch takes a second to import; the socket is already open, so the server knows we live.
    from penstock.hub.resolve import describe, resolve
    from penstock.model.random_weights import RandomCheckpoint
    from penstock.model.stages import stage_layers
    from penstock.runner.ranks.assemble import assemble_ranks

    engine = settings.engine
    kind_of(engine, overlaps=False)  # what contradicts itself is told before anything is loaded
    check_disk(engine)
    phases("files", 0, 0)
    checkpoint: Checkpoint
    if engine.load == "dummy":
        files = describe(settings.model)
        checkpoint, source = RandomCheckpoint(files.config), files.tokenizer_source
    else:
        checkpoint = resolve(settings.model)
        if isinstance(checkpoint, EncoderCheckpoint):
            encoder, info = build_encoder(checkpoint, engine, phases)
            return EngineLoop(encoder, mailbox, MonotonicClock()), info
        source = checkpoint.tokenizer_source
    model = checkpoint.config if engine.load == "dummy" else settings.model
    engine = for_recurrent(engine, checkpoint.config)
    draft = draft_checkpoint(checkpoint, source, engine)
    engine = for_recurrent(engine, checkpoint.config, draft.config if draft is not None else None)
    engine, choice = with_parallelism(engine, checkpoint, draft)
    check_stages(checkpoint.config, stage_layers(checkpoint.config, choice.parallelism.pp))
    check_disk(engine, choice.parallelism.num_ranks)

    def on_reading(reading: RankReading) -> None:
        with contextlib.suppress(Disconnected):  # the loop notices that the server is gone
            mailbox.send(RankState(reading))

    assembly = assemble_ranks(checkpoint, model, engine, phases, draft, on_lost, on_reading)
    phases("engine", 0, 0)
    guides = make_guides(checkpoint.config, source)
    floor = max(assembly.limits.block_size, assembly.limits.chunk_tokens // 8)
    budget = StepBudget(assembly.limits.chunk_tokens, target_s=settings.slo.tpot_s, floor=floor)
    cache = KVCache(
        assembly.size.num_blocks,
        assembly.limits.block_size,
        share_prefixes=engine.prefix_cache,
        routing_tokens=ROUTING_TOKENS,
        host_blocks=assembly.size.host_blocks,
        copy_s=assembly.copy_s,
        states=state_slots(checkpoint.config, assembly.limits),
    )
    disk = open_disk(assembly, checkpoint, engine)
    if disk is not None:
        cache.keep_on_disk(disk)
    speculation, speculates = make_speculation(engine, assembly, cache)
    weights = None if engine.load == "dummy" else describe(settings.model).path
    transfer = make_transfer(settings, checkpoint.config, weights, assembly, cache, mailbox)
    phases.close()
    slots = AdapterSlots(assembly.adapters.num_slots if assembly.adapters is not None else 0)
    scheduler = Scheduler(
        cache,
        budget,
        max_num_seqs=assembly.limits.max_num_seqs,
        patience_s=settings.slo.patience_s,
        adapters=slots,
        num_batches=assembly.parallelism.pp,
        images=image_slots(checkpoint.config, assembly.limits),
    )
    num_ranks = assembly.parallelism.num_ranks
    kv_bytes = round(assembly.size.kv_bytes / assembly.kv_share)  # of all ranks
    kv_token_bytes = kv_bytes // (assembly.size.num_blocks * assembly.limits.block_size)
    peaks = peaks_of(assembly.device.driver_name)
    work = work_of(checkpoint.config, assembly.device.name, kv_token_bytes, peaks)
    info = EngineInfo(
        device=assembly.device.name,
        number_format=assembly.formats.number_format,
        quant=assembly.formats.quant,
        kv_dtype=assembly.formats.kv_dtype,
        kernels=assembly.formats.kernels,
        limits=ServingLimits(
            max_num_seqs=assembly.limits.max_num_seqs,
            chunk_tokens=assembly.limits.chunk_tokens,
            max_model_len=assembly.limits.max_model_len,
            block_size=assembly.limits.block_size,
            kv_capacity_tokens=assembly.size.num_blocks * assembly.limits.block_size,
        ),
        kv_bytes=kv_bytes,
        state_bytes=checkpoint.config.state_bytes,
        state_snapshots=assembly.limits.state_snapshots,
        host_blocks=assembly.size.host_blocks,
        host_tokens_per_s=assembly.limits.block_size / assembly.copy_s if assembly.copy_s else None,
        disk_blocks=disk.num_blocks if disk is not None else 0,
        startup_s=phases.seconds,
        startup_cpu_s={"process": round(phases.began_cpu_s, 3), **phases.cpu_seconds},
        began_s=phases.began_s,
        routing_tokens=cache.routing.size if cache.routing is not None else 0,
        work=work,
        weight_bytes=weight_bytes(checkpoint.config, assembly.formats.number_format, assembly.formats.quant),
        kv_token_bytes=kv_token_bytes,
        read_bytes_per_s=peaks.bytes_per_s * num_ranks if peaks is not None else None,
        device_name=assembly.device.driver_name,
        device_uuid=assembly.device.uuid,
        embeds=assembly.embedder is not None,
        takes_images=assembly.limits.image_tokens > 0,
        max_image_tokens=assembly.limits.image_tokens,
        max_loras=slots.num_slots,
        speculation=speculates,
        can_park=assembly.memory is not None,
        parallelism=choice.lines,
        layout=assembly.parallelism.short if num_ranks > 1 else "",
        rank_reads=rank_reads(
            checkpoint.config,
            assembly.formats.number_format,
            assembly.formats.quant,
            assembly.parallelism,
            stage_layers(checkpoint.config, assembly.parallelism.pp),
            kv_token_bytes,
        ),
        other_gpus=assembly.other_gpus,
        kv_port=transfer.port,
        kv_layout=transfer.layout,
        kv_movers=transfer.movers,
    )
    made = Engine(
        scheduler,
        assembly.runner,
        work,
        guides=guides,
        speculation=speculation,
        embeddings=EmbedQueue(assembly.embedder, num_devices=num_ranks),
        lora=_lora(assembly, slots, engine),
        memory=transfer.memory,
        experts=assembly.experts,
        transfer=transfer.exchange,
        num_devices=num_ranks,
        vision=checkpoint.config.vision,
    )
    if assembly.experts is not None:
        report_experts(assembly.experts, mailbox.send)
    made.report_disk(MonotonicClock().now())
    return EngineLoop(made, mailbox, MonotonicClock(), _step_log(settings, assembly)), info


def _lora(assembly: Assembly, slots: AdapterSlots, settings: EngineSettings) -> LoraManager | None:
    if assembly.adapters is None:
        return None
    return LoraManager(assembly.adapters, slots, max_host=settings.max_cpu_loras or 4 * slots.num_slots)


def _step_log(settings: Settings, assembly: Assembly) -> StepLog | None:
    if settings.engine.step_log is None:
        return None
    limits = StepLimits(
        kv_tokens=assembly.size.num_blocks * assembly.limits.block_size,
        block_tokens=assembly.limits.block_size,
        max_sequences=assembly.limits.max_num_seqs,
        chunk_tokens=assembly.limits.chunk_tokens,
        max_context_tokens=assembly.limits.max_model_len,
        overlaps=assembly.runner.overlaps,
    )
    return StepLog(Path(settings.engine.step_log), limits)
