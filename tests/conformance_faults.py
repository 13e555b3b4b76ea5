"""Faults in the text of kernels, which tests/conformance finds: see scripts/plant_faults.py."""

from __future__ import annotations

from typing import NamedTuple

TRITON, TRITON_STEPS = "[triton: or [triton]", "[triton and decode"
CUDA, CUDA_STEPS = "[cuda: or [cuda]", "[cuda and decode and not hopper and not conv"
HOPPER, HOPPER_STEPS = "hopper: or hopper]", "cuda-hopper"
CONV, FLASH = "cuda-conv", "cuda-flash"
EAGER, MTA = (
    "mta-eager: and every or mta-eager: and mixed",
    "[mta: and (rows or every or documents or parts or fewer or many)",
)
MTA_STEPS = "[mta and decode and not mta-"
CUDA_STEPS_OF_MTA = "mta-cuda"
BANDS, HEADS, ROWS, MIX = "mta-bands", "mta-heads", "[mta-rows", "mta-mix"


class Fault(NamedTuple):
    """`line` of a file of the package becomes `instead`; `tests` is pytest's -k of those that may find it."""

    name: str
    tests: str
    file: str
    line: str
    instead: str


OF = "conv_attention/"
FORWARD, SCORES, BACKWARD, SHARES = (
    f"{OF}triton/{x}.py" for x in ("forward_kernel", "backward_scores", "backward", "decode_shares")
)
SM80, BANDED = f"{OF}cuda_sm80/", f"{OF}banded/"
CONSUMER, WINDOW = f"{OF}hopper/forward_consumer.cuh", f"{OF}cuda_decode/window.cuh"
RELEASE, PINGPONG = "block.pipeline.release(next);  //", "if constexpr (PINGPONG)"
TAKE_GRADS = """else if (own.warpgroup == 1{}) {{  // a thread that only waits could miss the phase
            barrier_wait(block.grads_full, passed);
            take_halo(block.shared + GRADS_DOWN, at.score_grads_at, 0, GRADS_ABOVE, GRAD_PITCH, own.thread);
            {}barrier_arrive(block.grads_empty);
"""
LADDER = "../mta_ladder/"
OF_MTA = "multi_token_attention/"
STAGE, STEP, OF_STEP = f"{OF_MTA}triton/", f"{OF_MTA}decode/", f"{OF_MTA}decode_cuda/"
OF_BANDS, OF_HEADS, OF_ROWS, OF_MIX = (f"{OF_MTA}{x}_cuda/" for x in ("bands", "heads", "rows", "mix"))

BY_FILE = {
    (CUDA, f"{SM80}forward.cu"): {
        "no wait for the keys": ("copies_wait<0>();\n        __syncthreads();  // the k", "__syncthreads();  // the k"),
        "scores that other warps store": ("__syncthreads();  // the values have come", "//"),
        "scores not masked": ("                rows.mask_scores(scores, first_key + chunk);\n", ""),
        "keys that other threads copy": ("__syncthreads();  // the keys have come", "//"),
        "scratch for scores never zero": ("store_shared(shared + SCORES + i * 16, uint4{0, 0, 0, 0})", ""),
    },
    (CUDA, f"{SM80}backward_rows.cuh"): {
        "no wait for the keys": ("copies_wait<1>();", ""),
        "dc that other warps store": ("__syncthreads();  // the dc of all warps", "//"),
        "a block's rows counted before they are stored": ("    __syncthreads();\n    if (t", "    if (t"),
    },
    (HOPPER, f"{BANDED}positions.cuh"): {
        "a row sees the next key": (".key_rows - at.query_rows) + 1", ".key_rows - at.query_rows) + 2"),
    },
    (HOPPER, f"{BANDED}forward_softmax.cuh"): {
        "sums not rescaled": ("running_sum[h] *= rescale[h];", ""),
    },
    (HOPPER, CONSUMER): {
        "a halo not stored": ("if (own.stores_halo) {", "if (false) {"),
        "a tile's scores not masked": ("        mask.mask_scores(scores, first_key, own.local_row, own.column);\n", ""),
        "no wait for the next stage": ("if (!next_is_full) block.pipeline.wait(next);\n", ""),
        "no barrier before the convolution": ("warpgroup_barrier(own.warpgroup + 1);\n            if ", "if "),
        "the next work tile's keys released": (
            f"if (own.thread == 0 && tile + 1 < end_tile) {RELEASE}",
            f"if (own.thread == 0) {RELEASE}",
        ),
        "a work tile never ends": ("            barrier_arrive(block.tile_empty + 8 * slot);\n", ""),
        "columns not carried on": ("even[i] = odd[24 + i], even[8 ", "even[i] = 0, even[8 "),
    },
    (HOPPER, f"{OF}hopper/forward_producer.cuh"): {
        "queries that are still read": (
            "if constexpr (QUERY_SLOTS == 1) barrier_wait(block.queries_empty, (count & 1) ^ 1);",
            "",
        ),
        "a slot that is still read": ("barrier_wait(block.tile_empty + 8 * slot, (use & 1) ^ 1);", ""),
    },
    (HOPPER, f"{BANDED}backward_scheduler.cuh"): {
        "products that do not wait for rows": (
            "    wait_for_count(chunks.rows_done(work.stage), chunks.blocks_of(work.chunk));",
            "",
        ),
        "all rows open at first": ("rows, chunks.open_at_first)", "rows, chunks.batch_heads * chunks.all_row_blocks)"),
    },
    (HOPPER, f"{OF}hopper/backward_producer.cuh"): {
        "work reported before it is stored": ("        barrier_wait_asleep(state.stored(block), state.phase());\n", ""),
        "queries copied over those that are still read": ("    barrier_wait(block.rows_empty, !odd_rows);\n", ""),
    },
    (HOPPER, f"{OF}hopper/backward_products.cuh"): {
        "the last products' shared memory not given back": (
            "    products_wait<0>();\n    if (iteration > work.iteration && thread == 0)",
            "    products_wait<0>();\n    if (false)",
        ),
    },
    (HOPPER, f"{OF}hopper/backward_consumer.cuh"): {
        "threads that wait for rows of dc and do not take them": (
            TAKE_GRADS.format(" && own.thread < 8 * GRADS_ABOVE", ""),
            TAKE_GRADS.format("", "if (own.thread < 8 * GRADS_ABOVE) "),
        ),
    },
    (CUDA_STEPS, f"{OF}cuda_decode/many_heads.cu"): {
        "no wait for the keys": (
            "        copies_wait<2 * STAGES - 1>();\n        meet_team();\n        multiply",
            "        meet_team();\n        multiply",
        ),
        "none for the other warp of a team": ("    else block_sync(", "    else if (false) block_sync("),
        "scores before the last tile's": ("    if (!is_first) block_sync(", "    if (false) block_sync("),
    },
    (HOPPER_STEPS, f"{OF}cuda_decode/hopper_heads.cu"): {
        "scores before the last tile's": ("          barrier_wait(shared", "          if (false) barrier_wait(shared"),
        "before the warp's before": ("        meet();\n        uint32_t from", "        uint32_t from"),
    },
    (CONV, f"{LADDER}cuda_conv/tiles.cuh"): {
        "no wait for a tile": ("copies_wait();\n        __syncthreads();\n        multiply_rows", "multiply_rows"),
    },
    (CONV, f"{LADDER}cuda_conv/forward.cu"): {
        "no barrier before the convolution": ("__syncthreads();\n        load_tile(tile, v, ", "load_tile(tile, v, "),
    },
    (FLASH, f"{LADDER}cuda_flash.cu"): {
        "no wait for the keys": (
            "        copies_wait<2 * STAGES - 2>();\n        __syncthreads();\n        values.copy",
            "values.copy",
        ),
        "beyond the block's memory": (" = KEYS_AT + STAGES * KEY_TILE", " = KEYS_AT + STAGES * KEY_TILE + 16"),
    },
    (FLASH, "nvrtc/swizzle.cuh"): {
        "bank conflicts": ("(chunk ^ row % 8 * WAYS<Columns> / 8)", "chunk"),
    },
    (CUDA_STEPS, WINDOW): {
        "queries before the first token": (" && tap >= QUERY_TAPS - segment.length", ""),
        "a weight's stride": ("% KEY_TAPS * weight.stride_key", "% KEY_TAPS"),
    },
    (TRITON, FORWARD): {
        "a row sees the next key": ("<= last_column[:, None], score", "<= last_column[:, None] + 1, score"),
        "a tile without its mask": ("imum(first_position - BAND + 1", "imum(first_position + BLOCK_N"),
        "the key behind the last": ("tl.where((key < key_rows)[None", "tl.where((key <= key_rows)[None"),
        "sums not rescaled": ("g_sum = running_sum * rescale ", "g_sum = running_sum "),
        "a document sees the one before": (
            'tl.where(key[None, :] >= first_seen[:, None], scores, float("-inf"))\n    r',
            "scores\n    r",
        ),
        "the last number of a row not written": ("[:, None] & (dim < HEAD_DIM", "[:, None] & (dim < HEAD_DIM - 1"),
        "strides of heads and sequences exchanged": (
            "b + (batch_head % heads).to(tl.int64) * stride_oh",
            "h + (batch_head % heads).to(tl.int64) * stride_ob",
        ),
        "a diagonal of the band left out": ("for diagonal in tl.range(BAND,", "for diagonal in tl.range(BAND - 1,"),
    },
    (TRITON, BACKWARD): {
        "dweight never zero": ("dweight = torch.zeros(weight.s", "dweight = torch.empty(weight.s"),
        "dq without a factor": ("ey_units, chunk, factor=LN_2.value", "ey_units, chunk, factor=1.0"),
        "dv of one query head alone": ("else dv.sum(2), dweight", "else dv[:, :, 0], dweight"),
        "one loss scale for all sequences": (" scale.flatten(", " scale.amin().expand_as(scale).contiguous().flatten("),
    },
    (TRITON, SCORES): {
        "a sum that no chunk began": ("(key < written)[:, None]", "(key <= written)[:, None]"),
        "dv times the loss scale": ("total /= loss_scale_of(loss_scale_ptr, batch_head, key, key_rows, SPANS)", ""),
        "dc without delta": ("(dp - delta[:, None])", "(dp - 0 * delta[:, None])"),
    },
    (TRITON_STEPS, SHARES): {
        "a page's offset": ("(key % PAGE_SIZE).to(tl.int64)", "key.to(tl.int64)"),
        "an older query sees a key too many": ("th - QUERY_TAPS + tap[:, None]", "th - QUERY_TAPS + tap[:, None] + 1"),
        "queries before the window": ("& (tap < QUERY_TAPS) & (held >= 0", "& (tap < QUERY_TAPS"),
        "a share too long": ("tl.minimum(start + keys,", "tl.minimum(start + keys + 1,"),
    },
    ("[eager: or ([eager and ragged)", f"{OF}reference.py"): {
        "scores of keys to come": ("        scores = scores.masked_fill(future, 0)\n", "        pass\n"),
        "a row sees the next key": ("> position[:, None]  # the key", "> position[:, None] + 1  # the key"),
        "all of a longer history": ("q_history[:, :, -before:]", "q_history[:, :, :before]"),
        "a document's values": ("k[:, :, at], v[:, :, at],", "k[:, :, at], v[:, :, at] + v[:, :, :1] * 1e-3,"),
        "a step's mask": ("unseen = column >= lengths.clamp(min=1)", "unseen = column > lengths.clamp(min=1)"),
    },
    (EAGER, f"{OF_MTA}reference.py"): {
        "the depth's factor": ("(wide.dtype) * factor)", "(wide.dtype))"),
        "the gate's bias": ("bias = None if gate_bias is None else", "bias = None if True else"),
        "the norm's eps": ("keepdim=True) + norm_eps)", "keepdim=True) + 1e-5)"),
    },
    (MTA, f"{STAGE}backward.py"): {
        "sums of other chunks forgotten": ("summed_keys = chunk.keys", "summed_keys = 0"),
        "one loss scale for all sequences": (
            "length, value = largest(lengths(grad_out)), largest(lengths(v))",
            "length, value = (torch.full_like(x, x.amax()) for x in map(largest, map(lengths, (grad_out, v))))",
        ),
    },
    (MTA, f"{STAGE}rows.py"): {
        "strides of pre_mix exchanged": ("stride_pre_in, stride_pre_out, ", "stride_pre_out, stride_pre_in, "),
    },
    (MTA_STEPS, f"{STEP}rows.py"): {
        "logsumexp of another row": (" row = length - POST_QUERY_TAPS + a", " row = length - POST_QUERY_TAPS + a - 1"),
    },
    (MTA_STEPS, f"{STEP}keys.py"): {
        "the slot of another row": ("tl.maximum(length - 1, 0) % SLOTS).to(tl", "tl.maximum(length, 0) % SLOTS).to(tl"),
        "strides of pre_mix exchanged": ("(pre_mix_ptr, stride_mo, stride_mi", "(pre_mix_ptr, stride_mi, stride_mo"),
    },
    (MTA_STEPS, f"{STEP}values.py"): {
        "a row's logsumexp not kept": ("tl.store(kept, logsumexp, mask=(head < HEADS) & (length > 0))", "kept += 0"),
        "another KV head": (
            "(head >= kv_head * GROUP) & (head < (kv_head + 1) * GROUP)",
            "head % (HEADS // GROUP) == kv_head",
        ),
        "infinity times a mixing's zero": ("tl.dot(mix, tl.where(finite, mixed, 0.0).to(DTYPE)", "tl.dot(mix, mixed"),
    },
    (BANDS, f"{OF_BANDS}convolve.cu"): {"no wait": ("copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();")},
    (BANDS, f"{OF_BANDS}gradients.cu"): {
        "no wait": ("copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
        "rows that are not owned": ("const bool owned = read >= args.above &&", "const bool owned ="),
        "rows twice": ("task, of_x, args.x", "task, segment, args.x"),
    },
    (BANDS, f"{OF_BANDS}layout.cuh"): {
        "unstored": (" stored_end(args, row);", " args.pitch;"),
        "rows of another document": ("row < segment.highest", "row < args.rows"),
        "keys that are not seen": ("pairs[0] = visible_pair(pairs[0], seen, key), pairs[1]", "pairs[1]"),
        "others' rows": ("if (first < segment.begin || last >= segment.stop) return false;", ""),
    },
    (HEADS, f"{OF_HEADS}tiles.cuh"): {
        "unstored": ("stored_end(args, row)", "args.pitch"),
        "stored too early": ("        __syncwarp();\n        store(", "        store("),
        "no wait": ("copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
    },
    (ROWS, f"{OF_ROWS}rows.cuh"): {
        "no wait": ("barrier_wait(shared + FULL_AT + 8 * turn.stage, turn.round);", ""),
    },
    (ROWS, f"{OF_ROWS}copies.cuh"): {
        "stored too soon": ("barrier_wait(shared + DONE_AT + 8 * going.stage, going.round);", ""),
        "no wait for a lane that still waits": ("    __syncwarp();  // of no bytes", "    // of no bytes"),
        "a load over a store": ("            stores_wait();\n            waiting--;", "            waiting--;"),
    },
    (ROWS, f"{OF_ROWS}sums.cuh"): {"one slot for sums": ("received.next(2);", "received.next(1);")},
    (ROWS, f"{OF_ROWS}backward.cu"): {
        "keys that are not seen": ("if (!row.sees(position + i / 2 * 8)) a[i] &= 0xFFFF0000u;", ""),
    },
    (MIX, f"{OF_MIX}values.cu"): {
        "units over units": ("block.units.acquire(unit)", "block.units.full_at(unit)"),
        "values over values": ("block.values.acquire(step)", "block.values.full_at(step)"),
    },
    (MIX, f"{OF_MIX}values_mixing.cuh"): {
        "no wait for units": ("        block.units.wait(unit);", ""),
        "planes over planes": ("if (i == 0) block.planes.acquire(step);", ";"),
    },
    (MIX, f"{OF_MIX}values_products.cuh"): {
        "no wait for planes": ("        block.planes.wait(step);", ""),
        "planes free too soon": ("        products_wait<0>();", ""),
    },
    (MIX, f"{OF_MIX}logits_scores.cuh"): {
        "keys over keys": ("barrier_wait(block.used(group, i), round & 1 ^ 1);", ""),
        "scores over scores": ("own.wait_until_empty(buffer, count / BUFFERS & 1 ^ 1);", ""),
        "no wait for queries": ("                wait(i);\n                if (warp / ", "                if (warp / "),
        "keys of another tile": ("arrive_in_block(block.rank(lane,", "arrive_in_block(block.rank(0,"),
    },
    (MIX, f"{OF_MIX}logits_mix.cuh"): {
        "no wait for scores": ("            own.wait(count);", ""),
        "keys that are not seen": ("if (Masked) hide(x[i], key, row);", ""),
        "sums of the next piece": ("        __syncwarp();  // the next piece begins with other sums", ""),
        "kept as they were": ("if (first) scale_kept(row, 0, key, factors[0]);", ""),
    },
    (MIX, f"{OF_MIX}logits.cu"): {
        "pieces of their own": ("if (!__any_sync(~0u, one.x != greatest)) continue;", "continue;"),
    },
    (MTA, f"{STAGE}products.py"): {
        "queries of another position": ("first_row + first,", "first,"),
        "scores of another KV head": (
            "right_desc.load([batch, head // group, key, 0]).reshape(BLOCK_N",
            "right_desc.load([batch, head % (heads // group), key, 0]).reshape(BLOCK_N",
        ),
        "scores that are not seen": ("tl.where(seen, x, 0.0)", "x"),
        "row product ends too soon": ("(pitch, first_position + first + BLOCK_M)", "(pitch, first_position + first)"),
        "loss scale of another document": ("position, mask=", "position * 0, mask="),
        "loss scale of another sequence": ("loss_scale_ptr + batch))", "loss_scale_ptr + 0 * batch))"),
        "one query head alone": (" = kv_head * group + step // divisor", " = kv_head * group + step // divisor * 0"),
        "sums of keys that no chunk summed": (" & (first + key < summed_keys)[:, None]", ""),
        "rows of a document end too soon": (" + (BLOCK - 1)", ""),
        "the last number of a row": (" < rows)[:, None] & (dim < head_dim", " < rows)[:, None] & (dim < head_dim - 1"),
        "queries without a factor": ("(total * factor)", "total"),
        "rows not copied": ("    return copy.copy_(x)", "    return copy"),
        "owned rows of left": (
            "left = scores[:, :, chunk.own_rows].flatten(0, 1)\n    block_m",
            "left = scores[:, :, :chunk.owned].flatten(0, 1)\n    block_m",
        ),
    },
    (ROWS, f"{STAGE}products.py"): {  # where all keys are seen and none are convolved
        "rows of a document begin too late": (
            "start = tl.maximum(tl.load(documents_ptr + first) - first_position, 0) // BLOCK * BLOCK",
            "start = tl.maximum(tl.load(documents_ptr + first) - first_position, 0) // BLOCK * BLOCK + 16",
        ),
    },
    (MTA, f"{STAGE}taps_gradient.py"): {
        "rows of x below": ("stop + (TAPS - 1))", "stop)"),
        "rows of another document above": (">= lowest) & (seen_row ", ""),
        "loss scale of another document": ("first_position + begin, mask", "first_position + first, mask"),
        "loss scale of another sequence": ("(loss_scale_ptr + batch_head // heads", "(loss_scale_ptr + batch_head * 0"),
        "rows that are not owned": (" above + owned", " rows"),
        "begins above": (" = above + tile", " = tile"),
        "tiles that see no key": ("first_position + after, first", "first_position + first, first"),
        "taps from another": (
            "(self.bands.before - self.convolution.pad)",
            "self.bands.before - 0 * self.convolution.pad",
        ),
        "sums not emptied": (" = emptied + (tl.zeros([INPUTS, OUTPUTS], tl.float32),)", " = emptied + (totals[tap],)"),
        "rows of grad beyond": (" < stop, CAUSAL", " < stop + 1, CAUSAL"),
    },
    (MTA, f"{STAGE}heads.py"): {
        "rows that are not owned": ("(row >= above) & (row < above + owned)", "row >= above"),
        "strides not exchanged": ("stride_out, stride_in", "stride_in, stride_out"),
        "loss scale of another row": ("first_position + row, counted", "first_position, counted"),
        "sums of rows before": (" = before + total", " = total"),
        "sums twice": ("        if SCALED:\n            total = tl", "        if not SCALED:\n            total = tl"),
        "stored keys": (
            "stored_end(row, first_position, pitch, CAUSAL, True",
            "tl.minimum(first_position + row, pitch",
        ),
    },
    (MTA, f"{STAGE}rows_backward.py"): {
        "large of all heads": (".abs(logsumexp", ".max(tl.abs(logsumexp), 0"),
    },
    (CUDA_STEPS_OF_MTA, f"{OF_STEP}keys.cu"): {
        "all see": (" - (PRE_QUERY_TAPS - 1)", ""),
        "a key too many": ("PRE_QUERY_TAPS + a) pair[", "PRE_QUERY_TAPS + a + 1) pair["),
        "scores of the turn before": ("        store_shared(row, load_shared_16(row + TURN * 2));\n", ""),
        "keys beyond": (" || key >= segment.stop", ""),
        "logits side by side": (" * args.stride_ln", ""),
        "no barrier at the end": ("shared, found);\n        __syncthreads();", "shared, found);\n"),
        "one buffer of scores": (" + turn % 2 * CONVOLVED", ""),
        "found of another place": ("x + segment.sequence", "x"),
    },
    (CUDA_STEPS_OF_MTA, f"{OF_STEP}values.cu"): {
        "sharers beyond those at once": (" segment.programs;", " min(segment.programs, AT_ONCE * 2 * HEADS);"),
        "slots not wrapped": ("slot + args.slots", "0"),
        "a key too many": ("row) + 1 - key", "row) + 2 - key"),
        "older rows loaded once": ("            if (row > 0) load(args, segment, row, first);\n", ""),
        "sums kept": ("            for (int i = 0; i < 4; i++) sums[i] = 0;\n            older", "            older"),
        "older rows of the turn before": ("first + TURN, taps", "first, taps"),
        "the state by every program": ("args.seen && segment.first_program == blockIdx.x && lane == 0", "false"),
        "partial of another sequence": ("x + segment.sequence", "x"),
        "no barrier before mixing": (") {\n                __syncthreads();", ") {\n                __syncwarp();"),
        "logsumexp of another slot": ("slot_of(args, newest_slot(args, segment), lane", "newest_slot(args, segment"),
        "mixing rounded": (".load<POST_MIX_FLOAT>(args.post_mix, true)", ".load<POST_MIX_FLOAT>(args.post_mix, false)"),
        "keys of the next block": (".stop + 16) return", ".stop) return"),
    },
    (CUDA_STEPS_OF_MTA, f"{OF_STEP}merge.cu"): {
        "no eps": ("HEAD_DIM + args.eps)", "HEAD_DIM)"),
        "no depth": ("* args.factor ", ""),
        "no bias": ("GATE == 1 && args.bias.start ? args.bias.at(0, 0) : ", ""),
        "no bias of dims": ("args.bias.start ? args.bias.at(row, 0) : ", ""),
        "lanes of others": ("other * COLUMNS) %", "other * 16) %"),
        "partials of none": ("if (program + i * GROUPS < count) ", ""),
        "gate before the norm": ("z) * factor + ", "z) + "),
        "rows of other programs": ("+ sequence + program", "+ program"),
        "a quarter": ("        z += __shfl_xor_sync(~0u, z, 2);\n", ""),
        "no barrier before the gate": ("        __syncthreads();", ""),
    },
    (CUDA_STEPS_OF_MTA, f"{OF_STEP}layout.cuh"): {
        "NaN everywhere": ("numbers[part][i] &= ~(0xFFFFu << half)", ""),
        "a page's offset": ("(key & (1 << args.page_bits) - 1)", "key"),
        "a page's stride": ("[(key >> args.page_bits) * args.table_stride_page] : 0;", "[key >> args.page_bits] : 0;"),
        "the page of the next tile": ("if (PAGED) look_up_page(args, tile + 1);", ""),
        "another slot": ("length - 1, 0) ", "length, 0) "),
        "rows outside": ("= key >= from && key < end;", "= key < end;"),
    },
    (CUDA_STEPS_OF_MTA, f"{OF_STEP}step.py"): {
        "wide of any strides": ("has_whole_groups(logits) and logits.data_ptr() % 16 == 0", "True"),
        "window of any strides": ("not has_whole_chunks(q_window)", "False"),
    },
    (CUDA_STEPS_OF_MTA, f"{OF_STEP}bands.cuh"): {
        "shift": (">> first % 2 * 16", ""),
    },
    (HEADS, f"{OF_HEADS}softmax.cuh"): {
        "keys that are not seen": ("Whole || seen.all(key, 1) ? p : 0", "p"),
    },
    (HEADS, f"{OF_HEADS}logits.cu"): {
        "rows that are not owned": ("  if (owned) {", "  {"),
    },
    (HEADS, f"{OF_HEADS}heads.cu"): {
        "rows that are not owned": ("  if (owned) {", "  {"),
        "few slots": ("turn % SLOTS * TILE", "turn % (SLOTS - 1) * TILE"),
        "unstored": ("if (unit.key >= stored_end(args, unit.row)) return;", ""),
    },
    (HEADS, f"{OF_HEADS}walk.cuh"): {
        "not full": ("            block_sync(full(number), THREADS);", ""),
        "not empty": ("if (number >= TILES) block_sync(empty(number), THREADS);", ""),
        "slots of segments": ("segment, before + turn", "segment, turn"),
        "nothing behind": ("store_zeros(args, behind, out)", "break"),
        "tasks left out": (".blocks, find(", ".blocks + 1, find("),
    },
    (HEADS, f"{OF_HEADS}rebuild.cu"): {
        "keys that are not seen": (" = whole.value", " = true"),
        "sums of other keys": ("key / UNIT) * args", "key / KEYS) * args"),
    },
    (HEADS, f"{OF_HEADS}mixed.cuh"): {
        "convolved of one half": ("load_matrices(pairs[i], tile + i * 32);", "load_matrices(pairs[i], tile);"),
    },
    (HEADS, f"{OF_HEADS}pre.cu"): {
        "unseen exponentials": (" if (unit.whole) return", " return"),
        "pieces": ("    __syncthreads();", ""),
    },
    (HEADS, f"{OF_HEADS}post.cu"): {
        "keys that are not seen": (" if (!Whole) p", " if (false) p"),
        "first factors": ("factor_of(first)", "0"),
    },
    (CUDA, f"{SM80}backward_products.cuh"): {
        "steps that other threads copy": ("__syncthreads();  // the step has come", "//"),
        "no wait for a step": ("copies_wait<PRODUCT_STAGES - 2>();", ""),
    },
}
FAULTS = [Fault(name, tests, file, *change) for (tests, file), of in BY_FILE.items() for name, change in of.items()]
