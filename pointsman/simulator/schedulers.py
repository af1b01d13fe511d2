"""How a replica forms its next batch: `vllm-v1`, and Vidur's `vllm`, `sarathi` and `orca`.

Each scheduler has a lazy path, taken while memory suffices for every decoding request (nothing to do but
count them), and an exact one that walks the running list and preempts. Vidur's schedulers take a request off
the running list while its batch is in flight and append it again afterwards; in the lazy path the list simply
stays as it is, since nobody looks at it meanwhile. `vllm-v1` keeps its list as vLLM does.
"""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.compiled.memory import int_list
from pointsman.simulator.prefixes import match, share_blocks, take_blocks
from pointsman.simulator.sequences import (
    append_running,
    blocks_for,
    blocks_next_step,
    evict,
    find_first_partial,
    integrate_kv,
    num_processed,
    pop_waiting,
    sort_by_arrival,
)
from pointsman.simulator.state import (
    ORCA,
    SARATHI,
    VLLM,
    batch_at,
    cache_at,
    entry_at,
    replica_at,
    request_at,
)


@kernel
def form_batch(sim, k, slot):
    """Fill batch `slot` of replica k; False if there is nothing to run."""
    replica = replica_at(sim.replicas, k)
    batch = batch_at(replica.batches, slot)
    batch.is_lazy = 1 if replica.num_stages == 1 else 0
    batch.num_entries = 0
    batch.num_decodes = 0
    batch.prefill_tokens = 0
    batch.context_tokens = 0
    batch.kv_tokens = 0
    batch.pairs = 0.0
    batch.squares = 0.0
    integrate_kv(sim, k)
    if replica.scheduler == VLLM:
        form_vllm(sim, k, slot)
    elif replica.scheduler == SARATHI:
        form_sarathi(sim, k, slot)
    elif replica.scheduler == ORCA:
        form_orca(sim, k, slot)
    else:
        form_vllm_v1(sim, k, slot)
    return batch.num_entries + batch.num_decodes > 0


@kernel
def add_prefill(sim, k, slot, i, num_tokens):
    replica = replica_at(sim.replicas, k)
    batch = batch_at(replica.batches, slot)
    entry_at(batch.entries, batch.num_entries).request = i
    entry_at(batch.entries, batch.num_entries).num_tokens = num_tokens
    batch.num_entries += 1
    processed = request_at(sim.requests, i).processed
    batch.prefill_tokens += num_tokens
    batch.kv_tokens += (processed + 63) // 64 * 64
    batch.pairs += num_tokens * (processed + num_tokens / 2)
    batch.squares += float(num_tokens) * num_tokens
    if replica.cache != 0 and sim.is_shared:
        share_blocks(sim, k, i, processed + num_tokens)


@kernel
def add_decode(sim, k, slot, i):
    replica = replica_at(sim.replicas, k)
    batch = batch_at(replica.batches, slot)
    entry_at(batch.entries, batch.num_entries).request = i
    entry_at(batch.entries, batch.num_entries).num_tokens = 1
    batch.num_entries += 1
    batch.num_decodes += 1
    batch.context_tokens += num_processed(sim, k, i)


@kernel
def add_all_decodes(sim, k, slot, num_new_blocks):
    replica = replica_at(sim.replicas, k)
    batch = batch_at(replica.batches, slot)
    take_blocks(sim, k, num_new_blocks)
    batch.num_decodes = replica.num_decoding
    batch.context_tokens = replica.sum_processed + replica.num_decoding * replica.steps


@kernel
def num_sequences(batch):
    return batch.num_entries + batch.num_decodes if batch.is_lazy else batch.num_entries


@kernel
def admit(sim, k, num_blocks):
    """Take the head of the queue and give it memory."""
    take_blocks(sim, k, num_blocks)
    replica_at(sim.replicas, k).num_holding += 1
    return pop_waiting(sim, k)


@kernel
def has_room_for_prompt(replica, num_blocks):
    return replica.num_blocks - replica.used_blocks - num_blocks >= replica.watermark_blocks


@kernel
def can_step_lazily(sim, k, num_new_blocks):
    """Vidur wants a free block for each decoding request in turn, even one that needs no new block."""
    replica = replica_at(sim.replicas, k)
    return replica.num_stages == 1 and replica.num_blocks - replica.used_blocks > num_new_blocks


@kernel
def grow_or_evict(sim, k, i, position, stop):
    """Vidur: make room for i's next token at the cost of the end of the list, or of i itself.

    Returns the new end of the running list, or -1 if i itself was evicted.
    """
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    while replica.num_blocks - replica.used_blocks < 1:
        if position < stop:
            stop -= 1
            evict(sim, k, running[stop])
        else:
            evict(sim, k, i)
            return -1
    # Blocks held so far cover processed - 1 tokens.
    if (num_processed(sim, k, i) - 1) % replica.block_size == 0:
        replica.used_blocks += 1
    return stop


@kernel
def keep_running(sim, k, start, stop):
    """Only running[start:stop] stays on the list."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    for position in range(start, stop):
        running[position - start] = running[position]
    replica.num_running = stop - start
    find_first_partial(sim, k, 0)


@kernel
def form_vllm(sim, k, slot):
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    batch = batch_at(replica.batches, slot)
    longest = 0
    while replica.num_waiting > 0:
        prefill = request_at(sim.requests, replica.waiting_head).prefill
        num_blocks = blocks_for(prefill, replica.block_size)
        padded = (batch.num_entries + 1) * max(longest, prefill)
        if (
            not has_room_for_prompt(replica, num_blocks)
            or padded > replica.max_batch_tokens
            or replica.num_holding == replica.max_seqs
            or batch.num_entries == replica.micro_seqs
        ):
            break
        longest = max(longest, prefill)
        add_prefill(sim, k, slot, admit(sim, k, num_blocks), prefill)
    if batch.num_entries > 0 or replica.num_running == 0:
        return

    if replica.is_unsorted:
        sort_by_arrival(sim, running, 0, replica.num_running)
        replica.is_unsorted = 0
    num_new_blocks = blocks_next_step(sim, k)
    if can_step_lazily(sim, k, num_new_blocks):
        add_all_decodes(sim, k, slot, num_new_blocks)
        return
    batch.is_lazy = 0
    position = 0
    stop = replica.num_running
    while position < stop and batch.num_entries < replica.micro_seqs:
        i = running[position]
        position += 1
        new_stop = grow_or_evict(sim, k, i, position, stop)
        if new_stop >= 0:
            stop = new_stop
            add_decode(sim, k, slot, i)
        else:
            stop = position
    keep_running(sim, k, position, stop)


@kernel
def form_sarathi(sim, k, slot):
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    batch = batch_at(replica.batches, slot)
    partial = int_list(sim.scratch, sim.max_seqs)
    num_partial = 0
    num_new_blocks = blocks_next_step(sim, k)
    if replica.num_running == 0 or can_step_lazily(sim, k, num_new_blocks):
        rest_from = 0
        rest_to = 0
        if replica.num_partial > 0:
            num_partial = take_partials(sim, k)
        if batch.is_lazy:
            add_all_decodes(sim, k, slot, num_new_blocks)
    else:
        batch.is_lazy = 0
        position = 0
        stop = replica.num_running
        while position < stop and batch.num_entries < replica.micro_seqs:
            i = running[position]
            position += 1
            if not request_at(sim.requests, i).is_decoding:
                partial[num_partial] = i
                num_partial += 1
                replica.num_partial -= 1
                continue
            new_stop = grow_or_evict(sim, k, i, position, stop)
            if new_stop >= 0:
                stop = new_stop
                add_decode(sim, k, slot, i)
            else:
                stop = position
        rest_from = position
        rest_to = stop

    num_tokens = batch.num_decodes
    num_skipped = 0
    for index in range(num_partial):
        i = partial[index]
        request = request_at(sim.requests, i)
        chunk = max(0, min(request.prefill - request.processed, replica.chunk_tokens - num_tokens))
        if chunk == 0:
            partial[num_skipped] = i
            num_skipped += 1
        else:
            num_tokens += chunk
            add_prefill(sim, k, slot, i, chunk)
    replica.num_partial += num_skipped
    if batch.is_lazy:
        put_in_front(sim, k, num_skipped)
    else:
        for position in range(rest_from, rest_to):
            partial[num_skipped + position - rest_from] = running[position]
        replica.num_running = num_skipped + rest_to - rest_from
        sort_by_arrival(sim, partial, 0, replica.num_running)
        for position in range(replica.num_running):
            running[position] = partial[position]
        find_first_partial(sim, k, 0)

    while replica.num_waiting > 0:
        prefill = request_at(sim.requests, replica.waiting_head).prefill
        chunk = min(prefill, replica.chunk_tokens - num_tokens)
        num_blocks = blocks_for(prefill, replica.block_size)
        if (
            replica.num_holding == replica.max_seqs
            or num_sequences(batch) == replica.micro_seqs
            or not has_room_for_prompt(replica, num_blocks)
            or chunk <= 0
        ):
            break
        num_tokens += chunk
        add_prefill(sim, k, slot, admit(sim, k, num_blocks), chunk)


@kernel
def take_partials(sim, k):
    """Move the partly prefilled requests from the running list to the scratch list, order kept."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    partial = int_list(sim.scratch, sim.max_seqs)
    num_taken = 0
    kept = replica.first_partial
    for position in range(replica.first_partial, replica.num_running):
        i = running[position]
        if request_at(sim.requests, i).is_decoding:
            running[kept] = i
            kept += 1
        else:
            partial[num_taken] = i
            num_taken += 1
    replica.num_running = kept
    replica.num_partial = 0
    replica.first_partial = kept
    return num_taken


@kernel
def put_in_front(sim, k, num_skipped):
    """Vidur's sarathi: chunks that got no budget come before everything that ran."""
    if num_skipped == 0:
        return
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    skipped = int_list(sim.scratch, sim.max_seqs)
    sort_by_arrival(sim, skipped, 0, num_skipped)
    for position in range(replica.num_running - 1, -1, -1):
        running[position + num_skipped] = running[position]
    for position in range(num_skipped):
        running[position] = skipped[position]
    replica.num_running += num_skipped
    replica.first_partial = 0


@kernel
def form_orca(sim, k, slot):
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    batch = batch_at(replica.batches, slot)
    if batch.is_lazy:
        add_all_decodes(sim, k, slot, 0)
    else:
        position = 0
        while position < replica.num_running and batch.num_entries < replica.micro_seqs:
            add_decode(sim, k, slot, running[position])
            position += 1
        keep_running(sim, k, position, replica.num_running)
    while (
        replica.num_waiting > 0
        and num_sequences(batch) < replica.micro_seqs
        and replica.num_blocks - replica.used_blocks >= replica.blocks_per_seq
    ):
        prefill = request_at(sim.requests, replica.waiting_head).prefill
        add_prefill(sim, k, slot, admit(sim, k, replica.blocks_per_seq), prefill)


@kernel
def chunk_of(request, limit, budget):
    """Prompt tokens vLLM would run now."""
    wanted = request.prefill - request.processed
    if 0 < limit < wanted:
        wanted = limit
    return min(wanted, budget)


@kernel
def form_vllm_v1(sim, k, slot):
    replica = replica_at(sim.replicas, k)
    batch = batch_at(replica.batches, slot)
    num_preemptions = sim.num_preemptions
    # With asynchronous scheduling this step was planned when the last one began, or now if none ran.
    planned_at = replica.step_began_at if replica.is_async and replica.num_running > 0 else sim.now
    # The limit on long prompts protects others: a request that is alone may use the whole budget.
    limit = replica.long_prefill_tokens if replica.num_running + replica.num_waiting > 1 else 0
    budget = run_lazily_v1(sim, k, slot, limit) if batch.is_lazy else -1
    if budget < 0:
        batch.is_lazy = 0
        budget = run_exactly_v1(sim, k, slot, limit)
    if sim.num_preemptions > num_preemptions:
        return
    while replica.num_waiting > 0 and budget > 0 and replica.num_running < replica.max_seqs:
        request = request_at(sim.requests, replica.waiting_head)
        if request.reached_at > planned_at:
            break
        watermark = replica.watermark_blocks if replica.num_running > 0 else 0
        # The whole prompt must fit, though only the first chunk is allocated.
        full = blocks_for(request.prefill, replica.block_size) - num_cached_blocks(sim, k)
        if full + watermark > replica.num_blocks - replica.used_blocks:
            break
        num_hit_blocks = use_cache(sim, k)
        chunk = chunk_of(request, limit, budget)
        budget -= chunk
        i = admit(sim, k, blocks_for(request.processed + chunk, replica.block_size) - num_hit_blocks)
        append_running(sim, k, i)
        add_prefill(sim, k, slot, i, chunk)
        request_at(sim.requests, i).is_in_flight = 1


@kernel
def num_cached_blocks(sim, k):
    """Blocks of the head of the queue that need not be free: they are cached, and somebody holds them."""
    replica = replica_at(sim.replicas, k)
    if replica.cache == 0:
        return 0
    num_hit_blocks = match(sim, k, replica.waiting_head, False)
    return num_hit_blocks - cache_at(replica.cache, 0).idle_hits


@kernel
def use_cache(sim, k):
    """The head of the queue takes what is cached of its prompt; -> how many blocks."""
    replica = replica_at(sim.replicas, k)
    if replica.cache == 0:
        return 0
    request = request_at(sim.requests, replica.waiting_head)
    num_hit_blocks = match(sim, k, replica.waiting_head, True)
    request.processed = num_hit_blocks * replica.block_size
    if request.scheduled_at < 0.0:
        request.hit_tokens = request.processed
        replica.hit_tokens += request.processed
        replica.prompt_tokens += request.num_prefill
    return num_hit_blocks


@kernel
def run_lazily_v1(sim, k, slot, limit):
    """Schedule all running requests at once; returns the budget left, or -1 if someone would be left out."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    budget = replica.max_batch_tokens - replica.first_partial
    if budget < 0:
        return -1
    num_new_blocks = blocks_next_step(sim, k)
    for position in range(replica.first_partial, replica.num_running):
        request = request_at(sim.requests, running[position])
        if request.is_decoding:
            if budget == 0:
                return -1
            budget -= 1
        else:
            chunk = chunk_of(request, limit, budget)
            budget -= chunk
            num_new_blocks += blocks_for(request.processed + chunk, replica.block_size)
            num_new_blocks -= blocks_for(request.processed, replica.block_size)
    if num_new_blocks > replica.num_blocks - replica.used_blocks:
        return -1

    # First, as there is room for as many stretches as blocks: new keys need what others lose.
    add_all_decodes(sim, k, slot, num_new_blocks)
    left = replica.max_batch_tokens - replica.first_partial
    for position in range(replica.first_partial, replica.num_running):
        i = running[position]
        if request_at(sim.requests, i).is_decoding:
            left -= 1
        else:
            chunk = chunk_of(request_at(sim.requests, i), limit, left)
            left -= chunk
            if chunk > 0:
                add_prefill(sim, k, slot, i, chunk)
    return budget


@kernel
def last_evictable(sim, k):
    """Position of the latest running request that no batch in flight needs, or -1."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    position = replica.num_running - 1
    while position >= 0 and request_at(sim.requests, running[position]).is_in_flight:
        position -= 1
    return position


@kernel
def run_exactly_v1(sim, k, slot, limit):
    """Walk the running list as vLLM does, preempting from its end; returns the budget left."""
    replica = replica_at(sim.replicas, k)
    running = int_list(replica.running, sim.max_seqs)
    budget = replica.max_batch_tokens
    position = 0
    while position < replica.num_running and budget > 0:
        i = running[position]
        request = request_at(sim.requests, i)
        if request.is_in_flight:
            position += 1
            continue
        if request.is_decoding:
            chunk = 1
            num_new_blocks = 1 if (num_processed(sim, k, i) - 1) % replica.block_size == 0 else 0
        else:
            chunk = chunk_of(request, limit, budget)
            num_new_blocks = blocks_for(request.processed + chunk, replica.block_size)
            num_new_blocks -= blocks_for(request.processed, replica.block_size)
        last = replica.num_running
        while num_new_blocks > replica.num_blocks - replica.used_blocks and last > position:
            last = last_evictable(sim, k)
            if last >= 0:
                evict(sim, k, running[last])
                for later in range(last + 1, replica.num_running):
                    running[later - 1] = running[later]
                replica.num_running -= 1
        if last <= position:  # it was the latest itself
            break
        take_blocks(sim, k, num_new_blocks)
        if request.is_decoding:
            add_decode(sim, k, slot, i)
        else:
            add_prefill(sim, k, slot, i, chunk)
        request.is_in_flight = 1
        budget -= chunk
        position += 1
    find_first_partial(sim, k, 0)
    return budget
