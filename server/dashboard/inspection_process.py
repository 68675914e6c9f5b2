"""The process that computes prompts for the inspector, beside the engine. Started by server/dashboard/inspector.py.

It loads a copy of the model when it is asked for the first time, answers one question after the other, and ends when
its connection is closed, whatever it is at. It is the first to go where memory or processors are short.
"""

import logging
import os
import queue
import random
import signal
import socket
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import torch

from kernels.attention.backend import BackendUnavailableError
from models.config_reader import read_config
from models.decoder import Decoder
from models.errors import ModelError
from models.float_decoder import load_float_decoder
from models.inspection import HABITS, InspectedStep, Inspection, inspect, record_bytes
from models.memory import NotEnoughMemory
from models.packed_weights import PackedWeights
from models.quantization import Quantization
from paged_cache.block_table import BlockTable
from paged_cache.manager import BlockManager
from server.dashboard.inspection_messages import (
    GONE,
    MAX_PROMPT_TOKENS,
    MAX_TOKENS,
    Answer,
    AttentionOutline,
    Candidate,
    HeadHabit,
    Inspected,
    InspectionRefused,
    InspectorSetup,
    InspectPrompt,
    LayerShapes,
    Picture,
    Question,
    Rope,
    ShowHead,
    StepRecord,
)
from server.dashboard.inspection_picture import draw_head, draw_input
from server.engine_sizing import select_dtype
from server.ipc import MessageCodec
from server.logging_setup import configure_logging

logger = logging.getLogger("octavo.inspector")

_MAX_KEPT = 8  # inspections
_MAX_KEPT_BYTES = 256 << 20  # of them together; the newest is kept whatever it takes
_SPARE_BYTES = 256 << 20  # of memory, for what is computed between the tensors that are kept
_NUM_OTHERS = 8  # sequences that hold blocks of a pool beside the one that is inspected, at least
_FIRST_TO_END = "1000"  # of those that the kernel chooses from when memory is used up


class InspectorModel:
    """The model and the inspections that are kept. Answers questions; knows no connection."""

    def __init__(self, decoder: Decoder, block_size: int) -> None:
        """Inspect prompts with `decoder`, in blocks of `block_size` tokens as the engine has them."""
        self._decoder = decoder
        self._block_size = block_size
        self._kept: OrderedDict[str, Inspection] = OrderedDict()  # the newest last

    def answer(self, question: Question) -> Answer:
        """What was asked for, or why not."""
        if isinstance(question, InspectPrompt):
            return self._inspect(question)
        inspection = self._kept.get(question.inspection_id)
        if inspection is None:
            return GONE
        config = self._decoder.config
        place = (
            ("head", question.head, config.num_q_heads)
            if isinstance(question, ShowHead)
            else ("position", question.position, inspection.num_computed)
        )
        for name, value, count in (("layer", question.layer, config.num_layers), place):
            if not 0 <= value < count:
                return InspectionRefused("out_of_range", f"{name} must be from 0 to {count - 1}, not {value}.")
        if isinstance(question, ShowHead):
            return Picture(draw_head(inspection.head(question.layer, question.head)))
        return Picture(draw_input(inspection.inputs[question.layer, question.position]))

    def _inspect(self, question: InspectPrompt) -> Inspected:
        most = len(question.token_ids) + question.max_tokens - 1
        manager, other_block_ids = _busy_pool(-(-most // self._block_size), self._block_size)
        table = BlockTable()

        def allocate(num_tokens: int) -> list[int]:
            manager.allocate(table, 0, num_tokens)
            return table.block_ids

        inspection = inspect(
            self._decoder, question.token_ids, question.max_tokens, manager.num_blocks, self._block_size, allocate
        )
        self._keep(question.inspection_id, inspection)
        return _described(inspection, other_block_ids)

    def _keep(self, inspection_id: str, inspection: Inspection) -> None:
        self._kept[inspection_id] = inspection
        while len(self._kept) > 1 and (
            len(self._kept) > _MAX_KEPT or sum(kept.num_bytes for kept in self._kept.values()) > _MAX_KEPT_BYTES
        ):
            self._kept.popitem(last=False)


def _busy_pool(num_free: int, block_size: int) -> tuple[BlockManager, list[int]]:
    """A pool whose `num_free` free blocks lie apart and out of order, as on a server at work; and what others hold."""
    manager = BlockManager(2 * num_free + _NUM_OTHERS, block_size, enable_prefix_caching=False)
    others = [BlockTable() for _ in range(manager.num_blocks)]
    for table in others:
        manager.allocate(table, 0, block_size)
    for table in random.Random(5).sample(others, num_free):  # noqa: S311  # the same each time
        manager.free(table)
    return manager, [block_id for table in others for block_id in table.block_ids]


def _described(inspection: Inspection, other_block_ids: list[int]) -> Inspected:
    decoder = inspection.decoder
    config = decoder.config
    return Inspected(
        token_ids=inspection.token_ids,
        num_prompt_tokens=inspection.num_prompt_tokens,
        block_ids=inspection.block_ids,
        num_pool_blocks=len(inspection.kv_layers[0].key),
        other_block_ids=other_block_ids,
        steps=[_step_record(step, inspection.block_size) for step in inspection.steps],
        outline=AttentionOutline(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            logit_softcap=config.attn_logit_softcap,
            has_bias=config.qkv_bias,
            has_norms=config.qk_norm,
            norms_output=config.sandwich_norms,
        ),
        layers=[_layer_shapes(inspection, layer) for layer in range(config.num_layers)],
        ropes=[
            Rope(
                config.layers[decoder.rope_of_layer.index(index)].rope.theta,
                rotary.magnitude,
                rotary.inverse_frequencies.tolist(),
            )
            for index, rotary in enumerate(decoder.rotary)
        ],
        habits=_strongest_heads(inspection),
    )


def _strongest_heads(inspection: Inspection) -> list[HeadHabit]:
    """For each habit the head that has it most, where there is one."""
    habits = inspection.habits()  # [num_layers, num_q_heads, len(HABITS)]
    found = []
    for index, name in enumerate(HABITS):
        layer, head = divmod(int(habits[..., index].argmax()), habits.shape[1])
        share = float(habits[layer, head, index])
        if share > 0:
            found.append(HeadHabit(name, layer, head, share))
    return found


def _step_record(step: InspectedStep, block_size: int) -> StepRecord:
    num_blocks = -(-(step.first_position + step.num_tokens) // block_size)
    return StepRecord(step.first_position, step.num_tokens, num_blocks, [Candidate(*each) for each in step.candidates])


def _layer_shapes(inspection: Inspection, layer: int) -> LayerShapes:
    """As the tensors themselves have them."""
    decoder = inspection.decoder
    attention = decoder.layers[layer].attention
    qkv = attention.qkv
    w_q, w_k, w_v = ([num_outputs, qkv.weight.shape[1]] for num_outputs in qkv.out_features)
    count = inspection.num_computed
    keys, values = (cache.shape for cache in (inspection.kv_layers[layer].key, inspection.kv_layers[layer].value))
    return LayerShapes(
        x=list(inspection.inputs[layer, :count].shape),
        w_q=w_q,
        w_k=w_k,
        w_v=w_v,
        q=list(inspection.queries[layer, :count].shape),
        k=[count, keys[1], keys[3]],  # of [num_blocks, num_kv_heads, block_size, head_dim]
        v=[count, values[1], values[3]],
        w_o=list(attention.output.weight.shape),
        sliding_window=decoder.config.layers[layer].sliding_window,
        rope=decoder.rope_of_layer[layer],
    )


def load(setup: InspectorSetup) -> InspectorModel:
    """A copy of the model as it is served. Raises NotEnoughMemory, ModelError, BackendUnavailableError."""
    config = setup.config
    path = Path(config.model_path)
    most = -(-(MAX_PROMPT_TOKENS + MAX_TOKENS) // config.block_size) * config.block_size
    more = _SPARE_BYTES + _MAX_KEPT_BYTES + record_bytes(read_config(path), most)
    packed = None
    if config.home is not None:
        with suppress(RuntimeError):  # ~ of a user who has no home directory
            packed = PackedWeights(Path(config.home).expanduser() / "packed", setup.num_threads)
    dtype = select_dtype(config, torch.device(setup.device))
    decoder = load_float_decoder(path, dtype, cast("Quantization", setup.quantization), packed, more)
    return InspectorModel(decoder, config.block_size)


def _receive_all(connection: socket.socket, codec: MessageCodec, questions: "queue.SimpleQueue[Question]") -> None:
    try:
        while (question := codec.receive(connection)) is not None:
            questions.put(question)  # type: ignore[arg-type]  # the codec decodes Question alone
    finally:
        os._exit(0)  # whatever the other thread is at: nobody waits for it


def _answer(model: InspectorModel, question: Question) -> Answer:
    try:
        return model.answer(question)
    except Exception:
        logger.exception("A question could not be answered.")
        return InspectionRefused("failed", "The inspector failed on this; the server's log says why.")


def main() -> None:
    """Answer the server at the other end of the socket whose descriptor is the first argument."""
    # When to stop is the decision of the server: closing the connection is its word.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError):  # a system that has no such file
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_END)
    connection = socket.socket(fileno=int(sys.argv[1]))
    setup = MessageCodec(InspectorSetup).receive(connection)
    if not isinstance(setup, InspectorSetup):
        return
    configure_logging(setup.config.log_level, setup.config.log_format, "inspector")
    torch.set_num_threads(setup.num_threads)
    codec = MessageCodec(Question)
    questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
    threading.Thread(target=_receive_all, args=(connection, codec, questions), daemon=True).start()
    try:
        answer = partial(_answer, load(setup))
    except (ModelError, NotEnoughMemory, BackendUnavailableError) as failure:
        connection.sendall(codec.encode(InspectionRefused("unavailable", str(failure))))
        return
    while True:
        connection.sendall(codec.encode(answer(questions.get())))


if __name__ == "__main__":
    main()
