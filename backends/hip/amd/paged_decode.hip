#include "hip/hip_runtime.h"
// Attention of a few query tokens over the pages of a cache, split over the keys. Launch: paged_decode.py.
//
// A key's row is read by LANES lanes, twice 8 elements each, so that a block of THREADS reads THREADS / LANES keys at
// once; the R rows of a block are (query token, query head) pairs that share the KV head, so that each key is read once
// for all of them. ELEMENT is the type of q and out, STORED that of the cache; LANES is 4 * EIGHTS. VECTOR: the rows of
// the cache start at multiples of 8 elements. Nothing depends on how many lanes a wave has, beyond LANES dividing it.
#include "shim_hip.h"

#define THREADS 256
#define MOST_WAVES 8
#define KEYS 2  // in flight per lane: 128 bytes of K and V, 64 KiB a multiprocessor with two blocks

struct Pages { i64 page, offset, head; };
// page_shift: of pages of 2**page_shift tokens, else -1
struct Sizes { int heads, group, width_k, width_v, page_size, page_shift, requests, chunk, splits; };
struct Strides { i64 q_token, q_head, out_token, out_head, lse_head, lse_token, table; };
struct Mask { int left, right; };
struct Scores { float factor, softcap; };  // in units of log2; softcap 0: none

DEVICE float none() { return __uint_as_float(0xff800000u); }

// The keys that any row of a request sees: [first, end).
DEVICE void visible(int length, int queries, Mask mask, int* first, int* end) {
    const i64 low = (i64)length - queries - mask.left, high = (i64)length + mask.right;
    *first = low > 0 ? (int)low : 0;
    *end = high < length ? (int)high : length;
}

template <int LANES, int R>
DEVICE void attend_rows(const ELEMENT* q, const STORED* k_pages, const STORED* v_pages, const int* table,
                        const int* cu_seqlens_q, const int* seq_lens, const u8* causal, const float* k_scale,
                        const float* v_scale, const float* sinks, ELEMENT* out, float* lse, float* parts,
                        float* parts_lse, Strides at, Pages k_at, Pages v_at, Sizes s, Mask mask, Scores scores,
                        int row_blocks, int k_step, int v_step) {
    constexpr int GROUPS = THREADS / LANES;
    __shared__ float shared[MOST_WAVES][LANES * 16];
    __shared__ float shared_top[MOST_WAVES][R], shared_sum[MOST_WAVES][R];
    const int kv_heads = s.heads / s.group;
    int item = blockIdx.x;
    const int row_block = item % row_blocks;
    item /= row_blocks;
    const int kv_head = item % kv_heads, request = item / kv_heads, split = blockIdx.y;
    const int token = cu_seqlens_q[request], queries = cu_seqlens_q[request + 1] - token;
    const int length = seq_lens[request], rows = queries * s.group, first_row = row_block * R;
    if (first_row >= rows) return;
    if (causal) mask.right = causal[request] ? 0 : mask.right;
    int first, end;
    visible(length, queries, mask, &first, &end);
    first += split * s.chunk;
    if (parts && split && first >= end) return;  // the first part is there even where no key is
    end = parts && end - first > s.chunk ? first + s.chunk : end;

    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int column[2] = {lane * 8, (lane + LANES) * 8};
    // queries of more than 2 rows would take too many registers: they wait in shared memory
    constexpr bool SHARED = R > 2;
    __shared__ float shared_query[SHARED ? R : 1][LANES * 16];
    float query[R][16], sum[R][16], top[R], total[R];
    const float factor = scores.factor * (k_scale ? k_scale[kv_head * k_step] : 1.0f);
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int row = first_row + r, head = kv_head * s.group + row % s.group;
        const ELEMENT* from = q + (token + row / s.group) * at.q_token + head * at.q_head;
        top[r] = none(), total[r] = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int c = column[i / 8] + i % 8;
            sum[r][i] = 0.0f;
            query[r][i] = row < rows && c < s.width_k ? to_float(from[c]) * factor : 0.0f;
            if (SHARED && group == 0) shared_query[SHARED ? r : 0][c] = query[r][i];
        }
    }
    if (SHARED) __syncthreads();
    const STORED* k_base = k_pages + kv_head * k_at.head;
    const STORED* v_base = v_pages + kv_head * v_at.head;
    const int* pages = table + request * at.table;
    const auto nth_of = [&](int j) { return s.page_shift >= 0 ? j >> s.page_shift : j / s.page_size; };
    // every row of the block sees the keys [all_first, all_end)
    const int last_row = (first_row + R < rows ? first_row + R : rows) - 1;
    const i64 position = (i64)length - queries;  // of the first query token
    const i64 all_first = position + last_row / s.group - mask.left;
    const i64 all_end = position + first_row / s.group + mask.right + 1;

    int page[KEYS];
#pragma unroll
    for (int n = 0; n < KEYS; ++n) {
        const int j = first + group + n * GROUPS;
        page[n] = j < end ? pages[nth_of(j)] : 0;
    }
    // as often for every lane of a wave, since shuffles need them all
    for (int begin = first + group; begin < end + group; begin += GROUPS * KEYS) {
        if (SHARED) __threadfence_block();  // else the compiler takes all queries into registers, once
        Few<STORED, 8> key[KEYS][2], value[KEYS][2];
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            const int j = begin + n * GROUPS, next_j = j + GROUPS * KEYS;
            const i64 offset = j - nth_of(j) * s.page_size;
            const STORED* k_from = k_base + page[n] * k_at.page + offset * k_at.offset;
            const STORED* v_from = v_base + page[n] * v_at.page + offset * v_at.offset;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int c = column[half];
                key[n][half].clear(), value[n][half].clear();
                if (j < end && c < s.width_k) key[n][half] = read<STORED, 8>(k_from + c, VECTOR, 8, next);
                if (j < end && c < s.width_v) value[n][half] = read<STORED, 8>(v_from + c, VECTOR, 8, next);
            }
            page[n] = next_j < end ? pages[nth_of(next_j)] : 0;
        }
        float score[KEYS][R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
            float mine[16];
#pragma unroll
            for (int i = 0; i < 16; ++i)
                mine[i] = SHARED ? shared_query[SHARED ? r : 0][column[i / 8] + i % 8] : query[r][i];
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                score[n][r] = 0.0f;
#pragma unroll
                for (int i = 0; i < 16; ++i) score[n][r] += mine[i] * to_float(key[n][i / 8].get(i % 8));
            }
        }
#pragma unroll
        for (int other = LANES / 2; other; other /= 2)
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
#pragma unroll
                for (int r = 0; r < R; ++r) score[n][r] += SHUFFLE_XOR(score[n][r], other);
        const int last = begin + (KEYS - 1) * GROUPS;
        const bool masked = begin < all_first || last >= all_end || last >= end;
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (scores.softcap != 0.0f)
#pragma unroll
                for (int n = 0; n < KEYS; ++n) score[n][r] = scores.softcap * tanhf(score[n][r]);
            if (masked) {
#pragma unroll
                for (int n = 0; n < KEYS; ++n) {
                    const int j = begin + n * GROUPS;
                    const i64 ahead = j - position - (first_row + r) / s.group;
                    if (j >= end || ahead > mask.right || -ahead > mask.left) score[n][r] = none();
                }
            }
            float highest = score[0][r];
#pragma unroll
            for (int n = 1; n < KEYS; ++n) highest = fmaxf(highest, score[n][r]);
            if (highest > top[r]) {
                const float shrink = exp2f(top[r] - highest);
                top[r] = highest;
                total[r] *= shrink;
#pragma unroll
                for (int i = 0; i < 16; ++i) sum[r][i] *= shrink;
            }
            const float base = top[r] == none() ? 0.0f : top[r];  // keeps (-inf) - (-inf) out of the exponents
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                score[n][r] = exp2f(score[n][r] - base);
                total[r] += score[n][r];
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS; ++n)
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float v = to_float(value[n][i / 8].get(i % 8));
#pragma unroll
                for (int r = 0; r < R; ++r) sum[r][i] += score[n][r] * v;
            }
    }

    // The groups of a wave, then the waves of the block.
    const int wave = threadIdx.x / warpSize, waves = THREADS / warpSize;
#pragma unroll
    for (int r = 0; r < R; ++r)
        for (int other = LANES; other < warpSize; other *= 2) {
            const float theirs = SHUFFLE_XOR(top[r], other), highest = fmaxf(top[r], theirs);
            const float base = highest == none() ? 0.0f : highest;
            const float mine = exp2f(top[r] - base), yours = exp2f(theirs - base);
            total[r] = total[r] * mine + SHUFFLE_XOR(total[r], other) * yours;
            for (int i = 0; i < 16; ++i) sum[r][i] = sum[r][i] * mine + SHUFFLE_XOR(sum[r][i], other) * yours;
            top[r] = highest;
        }
    if (threadIdx.x % warpSize == 0)
        for (int r = 0; r < R; ++r) shared_top[wave][r] = top[r], shared_sum[wave][r] = total[r];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        const int row = first_row + r;
        if (threadIdx.x % warpSize < LANES)
#pragma unroll
            for (int i = 0; i < 16; ++i) shared[wave][column[i / 8] + i % 8] = sum[r][i];
        __syncthreads();
        if (row < rows && threadIdx.x < s.width_v) {
            const int head = kv_head * s.group + row % s.group;
            const i64 at_token = token + row / s.group;
            float highest = none();
            for (int w = 0; w < waves; ++w) highest = fmaxf(highest, shared_top[w][r]);
            const bool last = !parts;
            const float sink = last && sinks ? sinks[head] * 1.44269504f : none();
            highest = fmaxf(highest, sink);
            const float base = highest == none() ? 0.0f : highest;
            float weight = exp2f(sink - base), result = 0.0f;
            for (int w = 0; w < waves; ++w) {
                const float scale = exp2f(shared_top[w][r] - base);
                weight += shared_sum[w][r] * scale;
                result += shared[w][threadIdx.x] * scale;
            }
            result = weight == 0.0f ? 0.0f : result / weight * (v_scale ? v_scale[kv_head * v_step] : 1.0f);
            const float log = weight == 0.0f ? none() : base + log2f(weight);
            if (last) {
                out[at_token * at.out_token + head * at.out_head + threadIdx.x] = From<ELEMENT>::value(result);
                if (lse && threadIdx.x == 0) lse[head * at.lse_head + at_token * at.lse_token] = log * 0.69314718f;
            } else {
                const i64 slot = (at_token * s.heads + head) * s.splits + split;
                parts[slot * s.width_v + threadIdx.x] = result;
                if (threadIdx.x == 0) parts_lse[slot] = log;
            }
        }
        __syncthreads();
    }
}

// The parts of each row; blockIdx.x is (token, head), and there are at least width_v threads.
DEVICE void combine_row(const float* parts, const float* parts_lse, const int* cu_seqlens_q, const int* seq_lens,
                    const u8* causal, const float* sinks, ELEMENT* out, float* lse, Strides at, Sizes s, Mask mask) {
    const int token = blockIdx.x / s.heads, head = blockIdx.x % s.heads;
    int request = 0;
    if (token >= cu_seqlens_q[s.requests]) return;
    for (int beyond = s.requests; beyond - request > 1;) {
        const int middle = (request + beyond) / 2;
        if (cu_seqlens_q[middle] <= token) request = middle;
        else beyond = middle;
    }
    if (causal) mask.right = causal[request] ? 0 : mask.right;
    int first, end;
    visible(seq_lens[request], cu_seqlens_q[request + 1] - cu_seqlens_q[request], mask, &first, &end);
    int count = end > first ? (end - first + s.chunk - 1) / s.chunk : 1;
    if (count > s.splits) count = s.splits;
    const i64 slot = (i64)blockIdx.x * s.splits;
    const float sink = sinks ? sinks[head] * 1.44269504f : none();
    float highest = sink;
    for (int i = 0; i < count; ++i) highest = fmaxf(highest, parts_lse[slot + i]);
    const float base = highest == none() ? 0.0f : highest;
    float weight = exp2f(sink - base), result = 0.0f;
    for (int i = 0; i < count; ++i) {
        const float scale = exp2f(parts_lse[slot + i] - base);
        weight += scale;
        if (threadIdx.x < s.width_v) result += scale * parts[(slot + i) * s.width_v + threadIdx.x];
    }
    if (threadIdx.x < s.width_v)
        out[token * at.out_token + head * at.out_head + threadIdx.x] =
            From<ELEMENT>::value(weight == 0.0f ? 0.0f : result / weight);
    if (lse && threadIdx.x == 0)
        lse[head * at.lse_head + token * at.lse_token] =
            weight == 0.0f ? none() : (base + log2f(weight)) * 0.69314718f;
}

KERNEL __launch_bounds__(THREADS, 2)
attend(const ELEMENT* q, const STORED* k_pages, const STORED* v_pages, const int* table, const int* cu_seqlens_q,
       const int* seq_lens, const u8* causal, const float* k_scale, const float* v_scale, const float* sinks,
       ELEMENT* out, float* lse, float* parts, float* parts_lse, Strides at, Pages k_at, Pages v_at, Sizes s, Mask mask,
       Scores scores, int row_blocks, int k_step, int v_step) {
    attend_rows<4 * EIGHTS, ROWS>(q, k_pages, v_pages, table, cu_seqlens_q, seq_lens, causal, k_scale, v_scale, sinks,
                                  out, lse, parts, parts_lse, at, k_at, v_at, s, mask, scores, row_blocks, k_step,
                                  v_step);
}

KERNEL combine(const float* parts, const float* parts_lse, const int* cu_seqlens_q, const int* seq_lens,
               const u8* causal, const float* sinks, ELEMENT* out, float* lse, Strides at, Sizes s, Mask mask) {
    combine_row(parts, parts_lse, cu_seqlens_q, seq_lens, causal, sinks, out, lse, at, s, mask);
}
