// The loop of `_Run.replay` (replay.py) over plain pools (pools.py), up to the first request that CUDA would refuse.
//
// The rules are written down, with their sources, in those two files, and a test compares the two. Sizes and addresses
// are counted in blocks of 512 B, as there; requests are in bytes.

#include <cstdint>
#include <deque>
#include <set>
#include <vector>

namespace {

using Number = std::int64_t;

constexpr Number block_bytes = 512, gap = 4096, addresses = Number{1} << 44;
constexpr Number small_blocks = 2048, small_segment = 4096, segment_step = 4096, large_request = 20480;

struct Block {
    Number start, size;
    Block *before, *after;  // its neighbours in the segment
    int pool;
    bool is_free;
};

struct BestFitFirst {
    bool operator()(const Block *a, const Block *b) const {
        return a->size != b->size ? a->size < b->size : a->start < b->start;
    }
};

struct Live {
    Number request;
    Block *block;
};

struct Row {
    Number values[5];
};

class Replay {
public:
    // requested, allocated, reserved; the most of each and the event after which it was reached; what was idle when the
    // most was reserved; the lowest address; and the first event that is left to do.
    Number figures[12] = {0, 0, 0, 0, -1, 0, -1, 0, -1, 0, addresses, 0};
    std::vector<Row> tables[3];  // live storages, free blocks, segments

    Replay(Number storages, int streams, Number limit, Number large_segment)
        : live(storages), pools(2 * streams), limit(limit), large_segment(large_segment) {}

    void run(const Number *storages, const Number *deltas, const int *stream_of, Number events) {
        Number &requested = figures[0], &allocated = figures[1], event = figures[11];
        for (; event < events; ++event) {
            const Number storage = storages[event];
            if (storage < 0 && !deltas[event]) continue;  // an event that is left out
            if (storage < 0) break;
            Live &entry = live[storage];
            const Live before = entry;
            const Number request = before.request + deltas[event];
            if (request > 0) {
                const Number size = (request + block_bytes - 1) / block_bytes;
                const int pool = 2 * (stream_of ? stream_of[storage] : 0) + (size <= small_blocks ? 0 : 1);
                Block *block = take(pool, size);
                if (!block && !(block = grow(pool, size, event))) break;
                entry = {request, block};
                requested += request;
                allocated += block->size;
                peak(3, requested, event);
                peak(5, allocated, event);
            } else if (before.block && !request) {
                entry = {0, nullptr};
            } else {
                break;
            }
            if (before.block) {
                requested -= before.request;
                allocated -= before.block->size;
                give(before.block);
            }
        }
        figures[11] = event;
    }

    void list_all() {
        for (Number storage = 0; storage < Number(live.size()); ++storage)
            if (const Block *block = live[storage].block)
                tables[0].push_back({{storage, live[storage].request, block->start, block->size, block->pool}});
        for (int pool = 0; pool < int(pools.size()); ++pool)
            for (const Block *block : pools[pool])
                tables[1].push_back({{pool, block->start, block->size, 0, 0}});
    }

private:
    using Pool = std::set<Block *, BestFitFirst>;
    std::vector<Live> live;
    std::vector<Pool> pools;
    std::deque<Block> blocks;
    std::vector<Block *> unused;
    Number limit, large_segment;

    bool peak(int which, Number level, Number event) {
        if (level <= figures[which]) return false;
        figures[which] = level;
        figures[which + 1] = event;
        return true;
    }

    Block *block(const Block &contents) {
        if (unused.empty()) return &blocks.emplace_back(contents);
        Block *reused = unused.back();
        unused.pop_back();
        *reused = contents;
        return reused;
    }

    Block *take(int pool, Number size) {
        Block wanted{0, size, nullptr, nullptr, pool, true};
        const auto found = pools[pool].lower_bound(&wanted);
        if (found == pools[pool].end()) return nullptr;
        Block *taken = *found;
        pools[pool].erase(found);
        return cut(taken, size);
    }

    Block *cut(Block *whole, Number size) {
        whole->is_free = false;
        const Number rest = whole->size - size;
        if (rest < (whole->pool % 2 ? small_blocks + 1 : 1)) return whole;
        Block *tail = block({whole->start + size, rest, whole, whole->after, whole->pool, true});
        if (whole->after) whole->after->before = tail;
        whole->after = tail;
        whole->size = size;
        pools[whole->pool].insert(tail);
        return whole;
    }

    void give(Block *freed) {
        Pool &pool = pools[freed->pool];
        if (Block *after = freed->after; after && after->is_free) {
            pool.erase(after);
            freed->size += after->size;
            unlink(after);
        }
        if (Block *before = freed->before; before && before->is_free) {
            pool.erase(before);
            freed->start = before->start;
            freed->size += before->size;
            unlink(before);
        }
        freed->is_free = true;
        pool.insert(freed);
    }

    void unlink(Block *merged) {
        if (merged->before) merged->before->after = merged->after;
        if (merged->after) merged->after->before = merged->before;
        unused.push_back(merged);
    }

    Block *grow(int pool, Number size, Number event) {
        Number &reserved = figures[2], &lowest = figures[10];
        const Number segment = size <= small_blocks    ? small_segment
                               : size < large_request ? large_segment
                                                      : (size + segment_step - 1) / segment_step * segment_step;
        if ((limit >= 0 && reserved + segment > limit) || segment + gap > lowest) return nullptr;
        const Number start = (lowest - gap - segment) / gap * gap;
        lowest = start;
        reserved += segment;
        tables[2].push_back({{event, pool, start, segment, 0}});
        Block *grown = cut(block({start, segment, nullptr, nullptr, pool, false}), size);
        if (peak(7, reserved, event)) figures[9] = reserved - figures[1] - grown->size;
        return grown;
    }
};

}  // namespace

extern "C" {

Replay *memsize_replay(const Number *storages, const Number *deltas, const int *stream_of, Number events, Number count,
                       int streams, Number limit, Number large_segment) {
    auto *replay = new Replay(count, streams, limit, large_segment);
    replay->run(storages, deltas, stream_of, events);
    replay->list_all();
    return replay;
}

const Number *memsize_figures(const Replay *replay) { return replay->figures; }

Number memsize_count(const Replay *replay, int table) { return Number(replay->tables[table].size()); }

const Number *memsize_rows(const Replay *replay, int table) { return replay->tables[table].data()->values; }

void memsize_close(Replay *replay) { delete replay; }
}
