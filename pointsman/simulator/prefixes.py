"""Which prefixes a replica has cached: vLLM's automatic prefix caching, without a list of blocks.

A prompt is a path in a tree of prefixes (LINK). A full KV block belongs to the link that holds its last
token, so that (key of the link, number of the block from the beginning of the prompt) says what is in it.
Blocks are kept in stretches: consecutive blocks of one link that the same requests hold, or that lie side by
side in the queue of free blocks. What is done to blocks is done to stretches, at a cost that does not grow
with their length.

As in vLLM:
- A block gets its key when it is scheduled to be filled. Equal blocks may exist more than once, if two
  requests compute them at the same time; who looks for one gets the one that was there first.
- Freed blocks with a key join the end of the queue, the deepest first; those without go to its front. New
  blocks are taken from its front, and lose their key.
- The last token of a prompt is computed in any case.

Blocks behind the last link are their request's own. They get a key when the request lets go of them: that of
the answer if somebody may continue it, one that nobody else knows if the request was preempted and will be
back, else none, and then they only take up their place in the queue. So an answer is found once it is
finished.

A request holds pieces: chains of stretches, from the deepest one on by `previous`. It has more than one piece
only where equal blocks exist. Splitting a stretch leaves its number to the deeper half, so that chains stay
as they are.
"""

from __future__ import annotations

from pointsman.compiled.jit import kernel
from pointsman.routing.records import link_at
from pointsman.simulator.state import (
    bucket_at,
    cache_at,
    piece_at,
    prefix_at,
    replica_at,
    request_at,
    stretch_at,
)

NONE = 0  # no stretch, no piece


# The table of stretches by key -----------------------------------------------------------------------------


@kernel
def bucket_of(cache, key):
    folded = (key ^ (key >> 31)) & 0x7FFFFFFF
    return bucket_at(cache.buckets, ((folded * 0x9E3779B1) >> 20) & (cache.num_buckets - 1))


@kernel
def new_stretch(cache, key, start, stop, num_holders):
    number = cache.unused_stretch
    if number != NONE:
        cache.unused_stretch = stretch_at(cache.stretches, number).newer
    else:
        cache.last_stretch += 1
        number = cache.last_stretch
    stretch = stretch_at(cache.stretches, number)
    stretch.key = key
    stretch.start = start
    stretch.stop = stop
    stretch.num_holders = num_holders
    return number


@kernel
def drop_stretch(cache, number):
    stretch = stretch_at(cache.stretches, number)
    if stretch.key != 0:
        bucket = bucket_of(cache, stretch.key)
        if stretch.before != NONE:
            stretch_at(cache.stretches, stretch.before).after = stretch.after
        else:
            bucket.first = stretch.after
        if stretch.after != NONE:
            stretch_at(cache.stretches, stretch.after).before = stretch.before
        else:
            bucket.last = stretch.before
    stretch.newer = cache.unused_stretch
    cache.unused_stretch = number


@kernel
def file_before(cache, number, after):
    """Put a stretch into its bucket before another one, or last."""
    stretch = stretch_at(cache.stretches, number)
    bucket = bucket_of(cache, stretch.key)
    before = stretch_at(cache.stretches, after).before if after != NONE else bucket.last
    stretch.before = before
    stretch.after = after
    if before != NONE:
        stretch_at(cache.stretches, before).after = number
    else:
        bucket.first = number
    if after != NONE:
        stretch_at(cache.stretches, after).before = number
    else:
        bucket.last = number


# The queue of free blocks ----------------------------------------------------------------------------------


@kernel
def queue_after(cache, number, older):
    """Put a stretch into the queue behind another one, or first."""
    newer = stretch_at(cache.stretches, older).newer if older != NONE else cache.oldest
    stretch = stretch_at(cache.stretches, number)
    stretch.older = older
    stretch.newer = newer
    if older != NONE:
        stretch_at(cache.stretches, older).newer = number
    else:
        cache.oldest = number
    if newer != NONE:
        stretch_at(cache.stretches, newer).older = number
    else:
        cache.newest = number


@kernel
def leave_queue(cache, number):
    stretch = stretch_at(cache.stretches, number)
    if stretch.older != NONE:
        stretch_at(cache.stretches, stretch.older).newer = stretch.newer
    else:
        cache.oldest = stretch.newer
    if stretch.newer != NONE:
        stretch_at(cache.stretches, stretch.newer).older = stretch.older
    else:
        cache.newest = stretch.older


@kernel
def free_keyless(cache, num_blocks, older):
    """Blocks without a key join the queue behind a stretch of it, or first."""
    if num_blocks == 0:
        return
    neighbour = older if older != NONE else cache.oldest
    if neighbour != NONE and stretch_at(cache.stretches, neighbour).key == 0:
        stretch_at(cache.stretches, neighbour).stop += num_blocks
    else:
        queue_after(cache, new_stretch(cache, 0, 0, num_blocks, 0), older)


@kernel
def take_blocks(sim, k, num_blocks):
    """Give out free blocks; what was cached in them is lost."""
    replica = replica_at(sim.replicas, k)
    replica.used_blocks += num_blocks
    if replica.cache == 0:
        return
    cache = cache_at(replica.cache, 0)
    while num_blocks > 0:
        number = cache.oldest
        stretch = stretch_at(cache.stretches, number)
        num_taken = min(num_blocks, stretch.stop - stretch.start)
        stretch.stop -= num_taken
        num_blocks -= num_taken
        if stretch.stop == stretch.start:
            leave_queue(cache, number)
            drop_stretch(cache, number)


# Hits ------------------------------------------------------------------------------------------------------


@kernel
def match(sim, k, i, takes):
    """How many blocks of request i's prompt are cached; it holds them from now on if it `takes` them."""
    replica = replica_at(sim.replicas, k)
    cache = cache_at(replica.cache, 0)
    cache.idle_hits = 0
    request = request_at(sim.requests, i)
    if not sim.is_shared and request.restarts == 0:
        return 0
    prefix = prefix_at(sim.prefixes, i)
    most = (request.prefill - 1) // replica.block_size
    found = 0
    for index in range(prefix.num_links + 1):
        key = prefix.own_key
        stop = most
        if index < prefix.num_links:
            link = link_at(prefix.links, index)
            key = link.key
            stop = min(most, link.tokens // replica.block_size)
        while found < stop:
            number, found_stop = find_stretch(cache, key, found) if key != 0 else (NONE, 0)
            if number == NONE or cache.num_pieces >= cache.max_pieces - replica.max_seqs:
                return found
            found_stop = min(found_stop, stop)
            if takes:
                hold_stretch(sim, k, i, number, found, found_stop)
            elif stretch_at(cache.stretches, number).num_holders == 0:
                cache.idle_hits += found_stop - found
            found = found_stop
    return found


@kernel
def find_stretch(cache, key, block):
    """The stretch of the link with this block that was cached first, and where another takes over."""
    stop = 1 << 31
    number = bucket_of(cache, key).first
    while number != NONE:
        stretch = stretch_at(cache.stretches, number)
        if stretch.key == key:
            if stretch.start <= block < stretch.stop:
                return number, min(stop, stretch.stop)
            if stretch.start > block:
                stop = min(stop, stretch.start)
        number = stretch.after
    return NONE, 0


@kernel
def hold_stretch(sim, k, i, number, start, stop):
    """Request i holds these blocks of a stretch from now on."""
    replica = replica_at(sim.replicas, k)
    cache = cache_at(replica.cache, 0)
    prefix = prefix_at(sim.prefixes, i)
    if stretch_at(cache.stretches, number).start < start:
        split(cache, number, start)
    if stop < stretch_at(cache.stretches, number).stop:
        number = split(cache, number, stop)
    stretch = stretch_at(cache.stretches, number)
    if stretch.num_holders == 0:
        leave_queue(cache, number)
        replica.used_blocks += stop - start
    stretch.num_holders += 1
    prefix.num_blocks = stop
    if prefix.piece == NONE or piece_at(cache.pieces, prefix.piece).stretch != stretch.previous:
        add_piece(cache, prefix, start)
    piece_at(cache.pieces, prefix.piece).stretch = number


@kernel
def split(cache, number, block):
    """Cut a stretch before this block; -> the first half, which is new."""
    deeper = stretch_at(cache.stretches, number)
    first = new_stretch(cache, deeper.key, deeper.start, block, deeper.num_holders)
    stretch_at(cache.stretches, first).previous = deeper.previous
    deeper.start = block
    deeper.previous = first
    file_before(cache, first, number)
    if deeper.num_holders == 0:
        queue_after(cache, first, number)
    return first


@kernel
def add_piece(cache, prefix, start):
    number = cache.unused_piece
    if number != NONE:
        cache.unused_piece = piece_at(cache.pieces, number).above
    else:
        cache.last_piece += 1
        number = cache.last_piece
    cache.num_pieces += 1
    piece = piece_at(cache.pieces, number)
    piece.start = start
    piece.above = prefix.piece
    prefix.piece = number


# What is computed, and let go ------------------------------------------------------------------------------


@kernel
def share_blocks(sim, k, i, num_tokens):
    """Request i's first tokens are computed in this step at the latest: their full blocks get their keys."""
    prefix = prefix_at(sim.prefixes, i)
    block_size = replica_at(sim.replicas, k).block_size
    while prefix.next_link < prefix.num_links:
        link = link_at(prefix.links, prefix.next_link)
        stop = min(num_tokens, link.tokens) // block_size
        if stop > prefix.num_blocks:
            give_key(sim, k, prefix, link.key, stop)
        if num_tokens < link.tokens:
            return
        prefix.next_link += 1


@kernel
def give_key(sim, k, prefix, key, stop):
    """The blocks that a request holds behind those with a key get one, up to `stop`."""
    cache = cache_at(replica_at(sim.replicas, k).cache, 0)
    start = prefix.num_blocks
    prefix.num_blocks = stop
    last = NONE
    if prefix.piece != NONE:
        last = piece_at(cache.pieces, prefix.piece).stretch
        stretch = stretch_at(cache.stretches, last)
        is_latest = bucket_of(cache, key).last == last  # else it would come before equal ones that are older
        if stretch.key == key and stretch.num_holders == 1 and is_latest:
            stretch.stop = stop
            return
    else:
        add_piece(cache, prefix, start)
    number = new_stretch(cache, key, start, stop, 1)
    stretch_at(cache.stretches, number).previous = last
    file_before(cache, number, NONE)
    piece_at(cache.pieces, prefix.piece).stretch = number


@kernel
def let_go(sim, k, i, num_tokens, is_over):
    """Request i, which has computed these tokens, frees its blocks; if it is not over, it will be back."""
    replica = replica_at(sim.replicas, k)
    cache = cache_at(replica.cache, 0)
    num_full = num_tokens // replica.block_size
    if sim.is_shared or request_at(sim.requests, i).restarts > 0 or not is_over:
        let_go_of_keyed(sim, k, i, num_full, is_over)
    else:
        free_keyless(cache, num_full, cache.newest)
        replica.used_blocks -= num_full
    if num_tokens > num_full * replica.block_size:
        free_keyless(cache, 1, NONE)
        replica.used_blocks -= 1


@kernel
def let_go_of_keyed(sim, k, i, num_full, is_over):
    """Request i frees its full blocks, of which some have keys or get one now."""
    replica = replica_at(sim.replicas, k)
    cache = cache_at(replica.cache, 0)
    prefix = prefix_at(sim.prefixes, i)
    num_own = num_full - prefix.num_blocks
    if num_own > 0:
        if prefix.own_key == 0 and not is_over:
            sim.num_own_keys += 1
            prefix.own_key = -sim.num_own_keys
        if prefix.own_key != 0:
            give_key(sim, k, prefix, prefix.own_key, num_full)
        else:
            free_keyless(cache, num_own, cache.newest)
            replica.used_blocks -= num_own
    piece = prefix.piece
    while piece != NONE:
        start = piece_at(cache.pieces, piece).start
        number = piece_at(cache.pieces, piece).stretch
        while number != NONE:
            stretch = stretch_at(cache.stretches, number)
            above = stretch.previous if stretch.start > start else NONE
            stretch.num_holders -= 1
            if stretch.num_holders == 0:
                replica.used_blocks -= stretch.stop - stretch.start
                free_stretch(cache, number)
            number = above
        above = piece_at(cache.pieces, piece).above
        piece_at(cache.pieces, piece).above = cache.unused_piece
        cache.unused_piece = piece
        cache.num_pieces -= 1
        piece = above
    forget_holding(prefix, is_over)


@kernel
def free_stretch(cache, number):
    """A stretch that nobody holds any more joins the end of the queue, as part of what it continues there."""
    stretch = stretch_at(cache.stretches, number)
    newest = cache.newest
    if newest != NONE and newest == stretch.after:
        deeper = stretch_at(cache.stretches, newest)
        if deeper.key == stretch.key and deeper.previous == number and deeper.start == stretch.stop:
            deeper.start = stretch.start
            deeper.previous = stretch.previous
            drop_stretch(cache, number)
            return
    queue_after(cache, number, newest)


@kernel
def forget_holding(prefix, is_over):
    prefix.piece = NONE
    prefix.num_blocks = 0
    prefix.next_link = 0
    if is_over:
        prefix.own_key = prefix.answer_key


@kernel
def lose_cache(sim, k):
    """Everything is free and nothing cached, as after a start."""
    replica = replica_at(sim.replicas, k)
    cache = cache_at(replica.cache, 0)
    for index in range(cache.num_buckets):
        bucket_at(cache.buckets, index).first = bucket_at(cache.buckets, index).last = NONE
    cache.unused_stretch = cache.last_stretch = cache.oldest = cache.newest = NONE
    cache.unused_piece = cache.last_piece = cache.num_pieces = NONE
    free_keyless(cache, replica.num_blocks, NONE)
