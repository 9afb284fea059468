// Attention of a few query tokens over the pages of a cache, split over the keys. Launch: paged_decode.py.
//
// A key's row is read by LANES lanes, LOADS vectors of VEC elements each, so that a block of THREADS reads
// THREADS / LANES keys at once, KEYS times per turn; the ROWS rows of a block are (query token, query head) pairs that
// share the KV head, so that each key is read once for all of them. ELEMENT is the type of q and out, STORED that of
// the cache. VECTOR: its rows start at multiples of VEC elements. FULL: K and V are as wide as all lanes are. Nothing
// depends on how many lanes a wave has, beyond LANES dividing it.
#include "shim.h"

constexpr int PER_LANE = LOADS * VEC, WIDTH = LANES * PER_LANE, GROUPS = THREADS / LANES, STEP = GROUPS * KEYS;

// In elements; one page, and one token of it, are within 2**31 of its start.
struct Pages { u32 page, offset; i64 head; };
struct Sizes { int width_k, width_v; Divide page, group, kv_heads, row_blocks; };
struct Strides { i64 q_token, q_head, out_token, out_head, lse_head, lse_token; };
struct Mask { int left, right; };
struct Scores { float factor, softcap; };  // in units of log2; softcap 0: none

DEVICE float none() { return __uint_as_float(0xff800000u); }
DEVICE Few<float, 4> four(const float* from) {
    Few<float, 4> few;
#pragma unroll
    for (int i = 0; i < 4; ++i) few.word[i] = __float_as_uint(from[i]);
    return few;
}

// Elements of a vector in float32, exactly, but for a power of two: each is 2**DROP times too small. Weights are 2**LIFT
// times too large, so that products stay normal numbers. A vector with a NaN among bytes is all NaN.
template <typename T> struct Read {
    static constexpr int DROP = 0, LIFT = 0;
    DEVICE float get(const Few<T, VEC>& few, int i) { return to_float(few.get(i)); }
    DEVICE float nan_or_zero(const Few<T, VEC>&) { return 0.0f; }
};
template <bool FNUZ> struct ReadBytes {
    static constexpr int DROP = FNUZ ? 119 : 120, LIFT = 60;
    // sign, exponent and mantissa where float32 has them
    template <typename T> DEVICE float get(const Few<T, VEC>& few, int i) {
        return __uint_as_float((u32)((int)(few.word[i / 4] << (24 - i % 4 * 8)) >> 4) & 0x87f00000);
    }
    template <typename T> DEVICE float nan_or_zero(const Few<T, VEC>& few) {
        u32 found = 0;
#pragma unroll
        for (u32 word : few.word) {
            const u32 zero = word ^ 0x80808080;  // a byte of it, where fnuz has NaN
            found |= FNUZ ? (zero - 0x01010101) & ~zero : (word & 0x7f7f7f7f) + 0x01010101;
        }
        return __uint_as_float(found & 0x80808080 ? 0x7fc00000 : 0);
    }
};
template <> struct Read<e4m3fn> : ReadBytes<false> {};
template <> struct Read<e4m3fnuz> : ReadBytes<true> {};

DEVICE float power(int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); }

// of a lane's i-th element
DEVICE int column(int lane, int i) { return i / VEC * LANES * VEC + lane * VEC + i % VEC; }

#define SLACK 8.0f  // sums are rescaled only when the highest score rises by more, in units of log2

// Softmaxes over some keys each, of a row's four columns: the highest score or nearly, the sum of weights, and sums.
struct Joined { float top, total, sum[4]; };

// `count` of them into one, in order, UNROLL at a time; they lie `step` and `sums_step` apart.
template <int UNROLL>
DEVICE Joined join(const float* tops, const float* totals, int step, const float* sums, int sums_step, int count) {
    Joined all = {none(), 0.0f, {}};
    for (int first = 0; first < count; first += UNROLL) {
        float top[UNROLL], total[UNROLL], highest = all.top;
        Few<float, 4> sum[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const i64 nth = min(first + u, count - 1);
            top[u] = first + u < count ? tops[nth * step] : none();
            total[u] = totals[nth * step];
            sum[u] = *(const Few<float, 4>*)(sums + nth * sums_step);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) highest = fmaxf(highest, top[u]);
        const float base = highest == none() ? 0.0f : highest, shrink = exp2f(all.top - base);
        all.top = highest, all.total *= shrink;
#pragma unroll
        for (int e = 0; e < 4; ++e) all.sum[e] *= shrink;
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const float weight = exp2f(top[u] - base);
            all.total += weight * total[u];
#pragma unroll
            for (int e = 0; e < 4; ++e) all.sum[e] += weight * sum[u].get(e);
        }
    }
    return all;
}

KERNEL __launch_bounds__(THREADS, BLOCKS)
attend(const ELEMENT* q, const STORED* k_pages, const STORED* v_pages, const int* table, const int* cu_seqlens_q,
       const int* seq_lens, const u8* causal, const float* k_scale, const float* v_scale, const float* sinks,
       ELEMENT* out, float* lse, float* parts, float* parts_top, float* parts_total, u32* arrived, i64 table_step,
       int table_width, Divide pairs, Divide least_chunk, Divide splits, Strides at, Pages k_at, Pages v_at, Sizes s,
       Mask mask, Scores scores, int k_step, int v_step) {
    typedef Few<STORED, VEC> Vector;
    typedef Read<STORED> As;
    __shared__ alignas(16) float shared[GROUPS * ROWS * WIDTH];  // q, then what each group has summed up
    __shared__ float shared_top[GROUPS * ROWS], shared_total[GROUPS * ROWS];
    __shared__ int shared_last;
    const int split = pairs.of(blockIdx.x), pair = blockIdx.x - split * pairs.divisor;  // some keys, and some rows
    const int head_pair = s.row_blocks.of(pair), row_block = pair - head_pair * s.row_blocks.divisor;
    const int request = s.kv_heads.of(head_pair), kv_head = head_pair - request * s.kv_heads.divisor;
    const int group_size = s.group.divisor;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int* pages = table + request * table_step;
    // most often the right ones: read while lengths are
    const int guess = split * least_chunk.divisor;
    int page[KEYS], ahead[KEYS];
#pragma unroll
    for (int n = 0; n < KEYS; ++n) {
        const int nth = min(s.page.of(guess + group + n * GROUPS), table_width - 1);
        page[n] = nth >= 0 ? pages[nth] : 0;
    }
    const int token = cu_seqlens_q[request], queries = cu_seqlens_q[request + 1] - token;
    const int length = seq_lens[request], first_row = row_block * ROWS;
    const int rows = min(queries * group_size - first_row, ROWS);
    if (rows <= 0) return;
    if (causal) mask.right = causal[request] ? 0 : mask.right;
    // the keys that any row of the request sees, and of these a part
    const i64 position = (i64)length - queries;  // of the first query token
    int first = (int)max(position - mask.left, (i64)0), end = (int)min((i64)length + mask.right, (i64)length);
    const int keys = max(end - first, 1), even = splits.of(keys + splits.divisor - 1);  // of a part, at least
    const bool longer = even > least_chunk.divisor;
    const int chunk = longer ? (even + STEP - 1) / STEP * STEP : least_chunk.divisor;
    const int count = longer ? (keys + chunk - 1) / chunk : least_chunk.of(keys + chunk - 1);  // parts
    first += split * chunk;
    if (split >= count) return;  // the first part is there even where no key is
    end = min(end, first + chunk);

    const STORED* k_base = k_pages + kv_head * k_at.head + (FULL ? lane * VEC : 0);
    const STORED* v_base = v_pages + kv_head * v_at.head + (FULL ? lane * VEC : 0);
    // Past the end, and past a row's width, what is there is read again; such a score is masked, and such a sum unused.
    const auto page_of = [&](int j) { return pages[s.page.of(min(j, end - 1))]; };
    const auto row_of = [&](Pages where, int page, int j) {
        j = min(j, end - 1);
        return (u64)(u32)page * where.page + (u64)(u32)(j - s.page.of(j) * s.page.divisor) * where.offset;
    };
    const auto load = [&](Vector (&to)[LOADS], const STORED* from, int width) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int c = column(lane, i * VEC);
            to[i] = read<STORED, VEC>(from + (FULL ? i * LANES * VEC : c < width ? c : 0), VECTOR, VEC, next);
        }
    };

    if (first < end && (first != guess || first + STEP > end))
#pragma unroll
        for (int n = 0; n < KEYS; ++n) page[n] = page_of(first + group + n * GROUPS);
    constexpr int SHARE = (ROWS * WIDTH + THREADS - 1) / THREADS;  // of q
    float loaded[SHARE];
#pragma unroll
    for (int n = 0; n < SHARE; ++n) {
        const int i = threadIdx.x + n * THREADS, row = i / WIDTH + first_row, c = i % WIDTH;
        const int nth = s.group.of(row), head = (kv_head - nth) * group_size + row;
        const bool live = i / WIDTH < rows && (FULL || c < s.width_k);
        loaded[n] = live ? to_float(q[(token + nth) * at.q_token + head * at.q_head + c]) : 0.0f;
    }
    Vector key[KEYS][LOADS], value[KEYS][LOADS];
    if (first < end) {
#pragma unroll
        for (int n = 0; n < KEYS; ++n)
            load(key[n], k_base + row_of(k_at, page[n], first + group + n * GROUPS), s.width_k);
#pragma unroll
        for (int n = 0; n < KEYS; ++n)
            load(value[n], v_base + row_of(v_at, page[n], first + group + n * GROUPS), s.width_v);
#pragma unroll
        for (int n = 0; n < KEYS; ++n) page[n] = page_of(first + STEP + group + n * GROUPS);
    }
    const float factor = scores.factor * (k_scale ? k_scale[kv_head * k_step] : 1.0f) * power(As::LIFT);
#pragma unroll
    for (int n = 0; n < SHARE; ++n)
        if (threadIdx.x + n * THREADS < ROWS * WIDTH) shared[threadIdx.x + n * THREADS] = loaded[n] * factor;
    __syncthreads();
#if !SHARED
    float query[ROWS][PER_LANE];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) query[r][i] = shared[r * WIDTH + column(lane, i)];
#endif
    // Every row of the block sees the keys [all_first, all_end).
    const i64 all_first = position + s.group.of(first_row + rows - 1) - mask.left;
    const i64 all_end = min(position + s.group.of(first_row) + mask.right + 1, (i64)end);

    // The scores of a turn, [ROWS][KEYS], are dealt to the lanes: a lane sums up OWN of them, whole, of one row. Where
    // there are fewer scores than lanes, COPIES of these have the same.
    constexpr int ALL = ROWS * KEYS, OWN = ALL > LANES ? ALL / LANES : 1, COPIES = ALL < LANES ? LANES / ALL : 1;
    constexpr int OF_ROW = LANES / ROWS;  // lanes
    static_assert(KEYS % OWN == 0, "a lane has scores of one row");
    const int own = lane / COPIES * OWN, own_row = first_row + own / KEYS;  // the first of a lane's
    const int ahead_of = s.group.of(own_row);  // query tokens
    float sum[ROWS][PER_LANE], top = none(), total = 0.0f;  // top and total: of the lane's row, over its scores
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) sum[r][i] = 0.0f;
    // K of the next turn is loaded as soon as this turn's is multiplied, and V likewise.
    for (int begin = first; begin < end; begin += STEP) {
        const int mine = begin + group;
#if SHARED
        // 0, though the compiler does not know: else it takes all queries into registers, once
        const float* query = shared + (begin >> 31);
#endif
        float score[ALL];
#pragma unroll
        for (int i = 0; i < ALL; ++i) {
            score[i] = 0.0f;
            if (As::DROP)
#pragma unroll
                for (const Vector& each : key[i % KEYS]) score[i] += As::nan_or_zero(each);
        }
#if SHARED
#pragma unroll
        for (int i = 0; i < PER_LANE; i += 4)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const auto few = *(const Few<float, 4>*)(query + r * WIDTH + column(lane, i));
#pragma unroll
                for (int n = 0; n < KEYS; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        score[r * KEYS + n] += few.get(e) * As::get(key[n][(i + e) / VEC], (i + e) % VEC);
            }
#else
#pragma unroll
        for (int n = 0; n < KEYS; ++n)
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const float k = As::get(key[n][i / VEC], i % VEC);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) score[r * KEYS + n] += query[r][i] * k;
            }
#endif
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            load(key[n], k_base + row_of(k_at, page[n], mine + STEP + n * GROUPS), s.width_k);
            ahead[n] = page_of(mine + 2 * STEP + n * GROUPS);
        }
        // each step halves the scores that a lane sums up, as long as there are two of them
        int left = ALL;
#pragma unroll
        for (int other = LANES / 2; other; other /= 2) {
            const bool upper = lane & other;
            if (left > 1) left /= 2;
#pragma unroll
            for (int i = 0; i < (ALL > 1 ? ALL / 2 : 1); ++i)
                if (i < left) {
                    const bool halves = ALL * other >= LANES;
                    const float keep = halves && upper ? score[i + left] : score[i];
                    const float send = halves && !upper ? score[i + left] : score[i];
                    score[i] = keep + SHUFFLE_XOR(send, other);
                }
        }
        if (As::DROP)
#pragma unroll
            for (int i = 0; i < OWN; ++i) score[i] *= power(As::DROP - As::LIFT);
        if (scores.softcap != 0.0f)
#pragma unroll
            for (int i = 0; i < OWN; ++i) score[i] = scores.softcap * tanhf(score[i]);
        if (begin < all_first || begin + STEP > all_end)
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const int j = mine + (own % KEYS + i) * GROUPS;
                const i64 before = j - position - ahead_of;
                if (j >= end || before > mask.right || -before > mask.left) score[i] = none();
            }
        float highest = score[0];
#pragma unroll
        for (int i = 1; i < OWN; ++i) highest = fmaxf(highest, score[i]);
        if (ANY(highest > top + SLACK)) {
            // as all lanes that have scores of this row
#pragma unroll
            for (int other = COPIES; other < OF_ROW; other *= 2)
                highest = fmaxf(highest, SHUFFLE_XOR(highest, other));
            const float raised = highest > top + SLACK ? highest : top;
            const float shrink = raised == top ? 1.0f : exp2f(top - raised);
            top = raised, total *= shrink;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float row_shrink = SHUFFLE(shrink, r * OF_ROW, LANES);
#pragma unroll
                for (int i = 0; i < PER_LANE; ++i) sum[r][i] *= row_shrink;
            }
        }
        const float low = top == none() ? 0.0f : top;  // keeps (-inf) - (-inf) out of the exponents
        const float base = As::LIFT ? low - As::LIFT : low;
        float weight[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) total += weight[i] = exp2f(score[i] - base);
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            float shares[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                shares[r] = SHUFFLE(weight[(r * KEYS + n) % OWN], (r * KEYS + n) / OWN * COPIES, LANES);
            if (As::DROP)
#pragma unroll
                for (const Vector& each : value[n])
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) shares[r] += As::nan_or_zero(each);
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const float v = As::get(value[n][i / VEC], i % VEC);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) sum[r][i] += shares[r] * v;
            }
            load(value[n], v_base + row_of(v_at, page[n], mine + STEP + n * GROUPS), s.width_v);
            page[n] = ahead[n];
        }
    }

    // The lanes of a row, then the groups of the block.
#pragma unroll
    for (int other = COPIES; other < OF_ROW; other *= 2) total += SHUFFLE_XOR(total, other);
    __syncthreads();  // q was there
    if (lane % OF_ROW == 0) {
        shared_top[group * ROWS + lane / OF_ROW] = top;
        shared_total[group * ROWS + lane / OF_ROW] = total;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < PER_LANE; i += 4)
            *(Few<float, 4>*)(shared + (group * ROWS + r) * WIDTH + column(lane, i)) = four(sum[r] + i);
    __syncthreads();
    const auto finish = [&](int r, int c, Joined row) {
        const int nth = s.group.of(first_row + r), head = (kv_head - nth) * group_size + first_row + r;
        const float sink = sinks ? sinks[head] * 1.44269504f : none(), highest = fmaxf(row.top, sink);
        const float base = highest == none() ? 0.0f : highest, scale = exp2f(row.top - base);
        const float weight = exp2f(sink - base) + row.total * power(-As::LIFT) * scale;
        const float unit = (v_scale ? v_scale[kv_head * v_step] : 1.0f) * power(As::DROP - As::LIFT);
        const float factor = weight == 0.0f ? 0.0f : scale / weight * unit;
        Few<ELEMENT, 4> result;
        result.clear();
#pragma unroll
        for (int e = 0; e < 4; ++e) result.set(e, From<ELEMENT>::value(row.sum[e] * factor));
        ELEMENT* to = out + (token + nth) * at.out_token + head * at.out_head + c;
        write(to, result, aligned<4>(to), 4, next);
        if (lse && c == 0)
            lse[head * at.lse_head + (token + nth) * at.lse_token] =
                weight == 0.0f ? none() : (base + log2f(weight)) * 0.69314718f;
    };
    constexpr int FOURS = WIDTH / 4;  // of a row
    const bool alone = count == 1;
    const i64 slot = (i64)pair * splits.divisor * ROWS;  // of this block's rows; a part's rows lie together
    for (int i = threadIdx.x; i < rows * FOURS; i += THREADS) {
        const int r = i / FOURS, c = i % FOURS * 4;
        if (!FULL && c >= s.width_v) continue;
        const Joined row = join<8>(shared_top + r, shared_total + r, ROWS, shared + r * WIDTH + c, ROWS * WIDTH, GROUPS);
        if (alone) {
            finish(r, c, row);
        } else {
            const i64 mine = slot + split * ROWS + r;
            *(Few<float, 4>*)(parts + mine * WIDTH + c) = four(row.sum);
            if (c == 0) parts_top[mine] = row.top, parts_total[mine] = row.total;
        }
    }
    if (alone) return;

    // The block that comes last joins the parts.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared_last = atomicAdd(arrived + pair, 1u) == (u32)count - 1;
        if (shared_last) arrived[pair] = 0;  // for the next layer
    }
    __syncthreads();
    if (!shared_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < rows * FOURS; i += THREADS) {
        const int r = i / FOURS, c = i % FOURS * 4;
        if (FULL || c < s.width_v)
            finish(r, c, join<16>(parts_top + slot + r, parts_total + slot + r, ROWS, parts + (slot + r) * WIDTH + c,
                                  ROWS * WIDTH, count));
    }
}
