// Which program of the decode kernels reads which keys.
//
// The keys of all (sequence, KV head) form a row of units of UNIT keys. Each program takes an equal run of it: the end
// of one head, any number of whole heads, the start of another. So programs are equally long however lengths differ;
// the kernel reads the lengths itself. With `splits`, that many programs share a head's keys instead, and have no other
// head. The same happens where all heads are equally long and programs divide evenly.
#pragma once

constexpr unsigned UNIT = 16;         // keys
constexpr unsigned FEW_IDLE = 16;     // one program in so many may have no keys where heads are shared evenly
constexpr unsigned FEWEST_UNITS = 4;  // a program; where there are fewer keys, not all programs work

// a / b, in a fraction of the instructions of the compiler's division, where the fast reciprocal is exact enough.
DEVICE unsigned quotient(unsigned a, unsigned b) {
    if (a >= 1u << 22) return a / b;
    const unsigned near = (unsigned)(a * reciprocal_fast(b));
    const int rest = a - near * b;
    return rest < 0 ? near - 1 : rest >= (int)b ? near + 1 : near;
}

struct Lengths {
    const int* start;  // the lower halves of int64 are int32 too
    int64_t stride;
    int batch, kv_heads;

    DEVICE int of(int sequence) const { return start[sequence * stride]; }
    // A sequence without tokens has a unit too, so that some program writes its zeros.
    DEVICE unsigned units(int sequence) const { return max(1u, (of(sequence) + UNIT - 1) / UNIT); }
};

struct Segment {  // a program's part of one head
    int sequence, kv_head, length;
    int start, stop;              // keys: from a whole unit on; zeros where there are none
    bool whole;                   // all of the head's keys
    unsigned first_unit, units;   // of the head, in the row of all
    int first_program, programs;  // that share the head's keys, so many from the first on: once counted
};

struct Work {
    Lengths lengths;
    unsigned program, splits;  // splits is 0 where programs take runs
    unsigned share, extra;     // units of a program, of all or of a head's; the first `extra` have one more
    unsigned end;              // of this program's units
    Segment segment;           // what is to do next

    DEVICE unsigned first_unit(unsigned of_program) const { return of_program * share + min(of_program, extra); }
    DEVICE unsigned program_of(unsigned unit) const {
        const unsigned in_longer = extra * (share + 1);
        return unit < in_longer ? unit / (share + 1) : extra + (unit - in_longer) / share;
    }

    // Distributes the units over programs; returns how many have some. All threads of a warp call it.
    DEVICE unsigned deal(unsigned programs, unsigned& of_head) {
        const unsigned lane = threadIdx.x % 32, kv_heads = lengths.kv_heads, heads = lengths.batch * kv_heads;
        unsigned longest = 0;
        of_head = 0;
        if (lengths.batch == 1) {
            of_head = longest = lengths.units(0);
        } else {
#pragma unroll 1
            for (unsigned i = lane; i < lengths.batch; i += 32) {
                const unsigned units = lengths.units(i);
                of_head += units, longest = max(longest, units);
            }
            of_head = __reduce_add_sync(~0u, of_head), longest = __reduce_max_sync(~0u, longest);
        }
        // Equally long heads get the same number of programs each, if that leaves few programs idle: a change of heads
        // costs more than a few further keys.
        const unsigned each = quotient(programs, heads);
        if (longest * lengths.batch == of_head && each * heads * FEW_IDLE >= programs * (FEW_IDLE - 1)) {
            splits = min(each, max(1u, longest / FEWEST_UNITS));
            return splits * heads;
        }
        const unsigned total = of_head * kv_heads, working = min(programs, max(1u, total / FEWEST_UNITS));
        share = total / working, extra = total - share * working;
        return working;
    }
    // Where the split's share of a head's units begins; sets `end`. Where tiles of `tile` units begin at pages, a program has
    // one tile less if shares begin a unit after a page. So shares begin there, unless the longest share would grow by more
    // than that unit. A single longer share is the head's first one; no tile begins before it, so it does not count.
    DEVICE unsigned share_head(unsigned units, unsigned split, unsigned tile) {
        share = quotient(units, splits), extra = units - share * splits;
        // Each split gets `each` tiles, the first `more` one more, if that does not exceed the longest share of now.
        const unsigned tiles = (units + tile - 2) / tile, each = (share + (extra > 1)) / tile - 1, more = tiles - each * splits;
        if (tile == 1 || more > splits) {
            end = first_unit(split + 1);
            return first_unit(split);
        }
        share = each, extra = more;
        end = first_unit(split + 1) * tile + 1;
        return split == 0 ? 0 : first_unit(split) * tile + 1;
    }
    // False if this program has nothing to do. All threads of a warp call it. `tile` is as in `share_head`.
    DEVICE bool begin(const Lengths& all, unsigned this_program, unsigned programs, unsigned of_splits, unsigned tile = 1) {
        lengths = all, program = this_program, splits = of_splits;
        const unsigned kv_heads = lengths.kv_heads;
        unsigned of_head;  // all units of a KV head
        if (!splits && program >= deal(programs, of_head)) return false;
        if (splits) {
            const unsigned head = quotient(program, splits), split = program - head * splits;
            segment.sequence = quotient(head, kv_heads), segment.kv_head = head - segment.sequence * kv_heads;
            const unsigned units = lengths.units(segment.sequence);
            const unsigned first = share_head(units, split, tile);
            set_segment(0, units, first);
            return true;
        }
        const unsigned start = first_unit(program);
        end = first_unit(program + 1);
        unsigned before = 0;  // of a KV head
        segment.sequence = lengths.batch == 1 ? 0 : find(start / kv_heads, before, of_head);
        segment.kv_head = (start - before * kv_heads) / of_head;
        set_segment(before * kv_heads + segment.kv_head * of_head, of_head, start);
        return true;
    }
    // The sequence that has this unit of a KV head, how many units it has, and those before it.
    DEVICE int find(unsigned unit, unsigned& before, unsigned& units) const {
        const unsigned lane = threadIdx.x % 32;
        for (unsigned first = 0;; first += 32) {
            const unsigned of_lane = first + lane < lengths.batch ? lengths.units(first + lane) : 0;
            unsigned sum = of_lane;
#pragma unroll
            for (int back = 1; back < 32; back *= 2) {
                const unsigned other = __shfl_sync(~0u, sum, max((int)lane - back, 0));
                if (lane >= back) sum += other;
            }
            const int shorter = __popc(__ballot_sync(~0u, before + sum <= unit));
            if (shorter < 32) {
                before += __shfl_sync(~0u, sum - of_lane, shorter);
                units = __shfl_sync(~0u, of_lane, shorter);
                return first + shorter;
            }
            before += __shfl_sync(~0u, sum, 31);
        }
    }
    DEVICE void set_segment(unsigned first_unit, unsigned units, unsigned first) {
        segment.length = lengths.of(segment.sequence);
        segment.first_unit = first_unit, segment.units = units;
        segment.whole = first == first_unit && end >= first_unit + units;
        const unsigned last = min(end, first_unit + units);
        segment.start = first < last ? (first - first_unit) * UNIT : 0;
        segment.stop = first < last ? min((int)((last - first_unit) * UNIT), segment.length) : 0;
    }
    // Go on to the next head; false if there is nothing left.
    DEVICE bool advance() {
        const unsigned next = segment.first_unit + segment.units;
        if (splits || next >= end) return false;
        if (++segment.kv_head == lengths.kv_heads) segment.kv_head = 0, segment.sequence++;
        set_segment(next, lengths.units(segment.sequence), next);
        return true;
    }

    // The programs that share the keys of a sequence's KV head, without being one of them: first, and how many.
    DEVICE void find_sharers(const Lengths& all, unsigned programs, unsigned of_splits, int sequence, int kv_head, int& first,
                             int& count) {
        lengths = all, splits = of_splits;
        unsigned of_head, before = 0;
        if (!splits) deal(programs, of_head);
        if (splits) {
            first = (sequence * lengths.kv_heads + kv_head) * splits, count = splits;
            return;
        }
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < sequence; i += 32) before += lengths.units(i);
        const unsigned units = lengths.units(sequence);
        before = __reduce_add_sync(~0u, before) * lengths.kv_heads + kv_head * units;
        first = program_of(before);
        count = program_of(before + units - 1) - first + 1;
    }
    DEVICE void count_sharers(Segment& of) const {
        of.first_program = program, of.programs = 1;
        if (splits) {
            of.first_program = program / splits * splits, of.programs = splits;
        } else if (!of.whole) {
            of.first_program = program_of(of.first_unit);
            of.programs = program_of(of.first_unit + of.units - 1) - of.first_program + 1;
        }
    }
};
