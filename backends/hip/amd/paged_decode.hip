#include "hip/hip_runtime.h"
// Attention of a few query tokens over the pages of a cache, split over the keys. Launch: paged_decode.py.
//
// The ROWS rows of a block are (query token, query head) pairs that share the KV head, so that each key is read once for
// all of them. Its groups of LANES lanes read different keys, in vectors of VEC elements: paged_rows.h and
// paged_matrix.h say how. ELEMENT is the type of q and out, STORED that of the cache. VECTOR: its rows start at
// multiples of VEC elements. FULL: K and V have WIDTH columns.
#include "shim_hip.h"

constexpr int WIDTH = (MATRIX ? 4 : LANES) * LOADS * VEC, GROUPS = THREADS / LANES, STEP = GROUPS * KEYS;
// Groups' sums are joined some columns at a time: CUDA has 48 KiB of shared memory without asking.
constexpr int COLUMNS = GROUPS * ROWS * WIDTH > 12 * 1024 ? WIDTH / 2 : WIDTH;

// In elements; one page, and one token of it, are within 2**31 of its start.
struct Pages { u32 page, offset; i64 head; };
struct Sizes { int width_k, width_v; Divide page, group, kv_heads, row_blocks; };
struct Strides { i64 q_token, q_head, out_token, out_head, lse_head, lse_token; };
struct Mask { int left, right; };
struct Scores { float factor, softcap; };  // in units of log2; softcap 0: none
typedef Few<STORED, VEC> Vector;

#define SLACK 8.0f  // sums are rescaled only when the highest score rises by more, in units of log2

DEVICE float none() { return __uint_as_float(0xff800000u); }
DEVICE float power(int exponent) { return __uint_as_float((u32)(127 + exponent) << 23); }
DEVICE Few<float, 4> four(const float* from) {
    Few<float, 4> few;
#pragma unroll
    for (int i = 0; i < 4; ++i) few.word[i] = __float_as_uint(from[i]);
    return few;
}

// Where four columns of a row lie in shared memory: in order, the lanes that store at once would share 8 of the banks. On
// an H200, 10.1 us for 10.7 for one request of 1,024 keys and 128 heads.
DEVICE int place_of(int r, int column) {
    return column ^ (r * 2 ^ column / (4 * 8)) % 8 * 4;
}

// Whether one of the bytes is NaN.
template <bool FNUZ> DEVICE bool any_nan(const Vector& few) {
    u32 found = 0;
#pragma unroll
    for (u32 word : few.word) {
        const u32 zero = word ^ 0x80808080;  // a byte of it, where fnuz has NaN
        found |= FNUZ ? (zero - 0x01010101) & ~zero : (word & 0x7f7f7f7f) + 0x01010101;
    }
    return found & 0x80808080;
}

// What a block works on: some keys of a KV head of a request, and some rows.
struct Block {
    const ELEMENT* q;
    const STORED *k, *v;
    const int* pages;
    Strides at;
    Pages k_at, v_at;
    Sizes s;
    Mask mask;
    float softcap;
    int token, kv_head, first_row, rows, first, end;
    int position;  // of the first query token
    int all_first, all_end;  // of the keys that all rows see

    __device__ __forceinline__ int nth(int r) const { return s.group.of(first_row + r); }  // query token of a row
    __device__ __forceinline__ int head(int r) const {
        return (kv_head - nth(r)) * s.group.divisor + first_row + r;
    }
    __device__ __forceinline__ const ELEMENT* query(int r) const {
        return q + (token + nth(r)) * at.q_token + head(r) * at.q_head;
    }
    // Past the end, and past a row's width, what is there is read again; such a score is masked, and such a sum unused.
    __device__ __forceinline__ int page_of(int j) const { return pages[s.page.of(min(j, end - 1))]; }
    __device__ __forceinline__ u64 row_of(const Pages& where, int page, int j) const {  // from the first page
        j = min(j, end - 1);
        return (u64)(u32)page * where.page + (u64)(u32)(j - s.page.of(j) * s.page.divisor) * where.offset;
    }
    DEVICE void load(Vector& to, const STORED* from, int c, int width) {
        to = read<STORED, VEC>(from + (FULL || c < width ? c : 0), VECTOR, VEC, next);
    }
    __device__ __forceinline__ bool sees(int token, int j) const {
        const int before = j - position - token;
        return j < end && before <= mask.right && -before <= mask.left;
    }
};

#if MATRIX
#include "paged_matrix_hip.h"
#else
#include "paged_rows_hip.h"
#endif

// Softmaxes over some keys each, of a row's four columns: the highest score or nearly, the sum of weights, and sums.
struct Joined { float top, total, sum[4]; };

// Those of a block's groups into one, in order.
DEVICE Joined join(const float* tops, const float* totals, const float* sums) {
    constexpr int EACH = GROUPS < 8 ? GROUPS : 8;  // loads in flight
    Joined all = {none(), 0.0f, {}};
    for (int first = 0; first < GROUPS; first += EACH) {
        float top[EACH], highest = all.top;
        Few<float, 4> sum[EACH];
#pragma unroll
        for (int u = 0; u < EACH; ++u) {
            top[u] = tops[(first + u) * ROWS];
            sum[u] = *(const Few<float, 4>*)(sums + (first + u) * ROWS * COLUMNS);
            highest = fmaxf(highest, top[u]);
        }
        const float base = highest == none() ? 0.0f : highest, shrink = exp2f(all.top - base);
        all.top = highest, all.total *= shrink;
#pragma unroll
        for (int e = 0; e < 4; ++e) all.sum[e] *= shrink;
#pragma unroll
        for (int u = 0; u < EACH; ++u) {
            const float weight = exp2f(top[u] - base);
            all.total += weight * totals[(first + u) * ROWS];
#pragma unroll
            for (int e = 0; e < 4; ++e) all.sum[e] += weight * sum[u].get(e);
        }
    }
    return all;
}

KERNEL __launch_bounds__(THREADS, BLOCKS)
attend(const ELEMENT* q, const STORED* k_pages, const STORED* v_pages, const float* k_scale, const float* v_scale,
       const float* sinks, ELEMENT* out, float* lse, const int* table, const int* cu_seqlens_q, const int* seq_lens,
       const u8* causal, float* parts, float* parts_top, float* parts_total, u32* arrived, i64 table_step,
       int table_width, Divide pairs, Divide least_chunk, Divide splits, Strides at, Pages k_at, Pages v_at, Sizes s,
       Mask mask, Scores scores, int k_step, int v_step) {
    __shared__ alignas(16) float shared[GROUPS * ROWS * COLUMNS];
    __shared__ float shared_top[GROUPS * ROWS], shared_total[GROUPS * ROWS];
    __shared__ int shared_last;
    const int split = pairs.of(blockIdx.x), pair = blockIdx.x - split * pairs.divisor;  // some keys, and some rows
    const int head_pair = s.row_blocks.of(pair), row_block = pair - head_pair * s.row_blocks.divisor;
    const int request = s.kv_heads.of(head_pair), kv_head = head_pair - request * s.kv_heads.divisor;
    Loop loop;
    const int* pages = table + request * table_step;
    // most often the right ones: read while lengths are
    const int guess = split * least_chunk.divisor;
#pragma unroll
    for (int n = 0; n < Loop::MINE; ++n) {
        const int nth = min(s.page.of(guess + loop.key_of(n)), table_width - 1);
        loop.page[n] = nth >= 0 ? pages[nth] : 0;
    }
    const int token = cu_seqlens_q[request], queries = cu_seqlens_q[request + 1] - token;
    const int length = seq_lens[request], first_row = row_block * ROWS;
    const int rows = min(queries * s.group.divisor - first_row, ROWS);
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
    Block b = {q, k_pages + kv_head * k_at.head, v_pages + kv_head * v_at.head, pages, at, k_at, v_at, s, mask,
               scores.softcap, token, kv_head, first_row, rows, first, end, (int)position};
    b.all_first = (int)max(position + b.nth(rows - 1) - mask.left, (i64)0);
    b.all_end = (int)min(position + b.nth(0) + mask.right + 1, (i64)end);
    if (first < end && (first != guess || first + STEP > end))
#pragma unroll
        for (int n = 0; n < Loop::MINE; ++n) loop.page[n] = b.page_of(first + loop.key_of(n));
    loop.run(b, scores.factor * (k_scale ? k_scale[kv_head * k_step] : 1.0f), shared);

    // What a row's sums are multiplied with, for all of its keys; one thread writes the LSE.
    const auto factor_of = [&](int r, float top, float total, bool tell) {
        const int head = b.head(r);
        const float sink = sinks ? sinks[head] * 1.44269504f : none(), highest = fmaxf(top, sink);
        const float base = highest == none() ? 0.0f : highest, scale = exp2f(top - base);
        const float weight = exp2f(sink - base) + total * power(-As::LIFT) * scale;
        const float unit = (v_scale ? v_scale[kv_head * v_step] : 1.0f) * power(As::DROP - As::LIFT);
        if (lse && tell)
            lse[head * at.lse_head + (token + b.nth(r)) * at.lse_token] =
                weight == 0.0f ? none() : (base + log2f(weight)) * 0.69314718f;
        return weight == 0.0f ? 0.0f : scale / weight * unit;
    };
    const auto put = [&](int r, int c, const float (&sum)[4], float factor) {
        Few<ELEMENT, 4> result;
        result.clear();
#pragma unroll
        for (int e = 0; e < 4; ++e) result.set(e, From<ELEMENT>::value(sum[e] * factor));
        ELEMENT* to = out + (token + b.nth(r)) * at.out_token + b.head(r) * at.out_head + c;
        write(to, result, aligned<4>(to), 4, next);
    };
    const bool alone = count == 1;
    const i64 slot = (i64)pair * splits.divisor * ROWS;  // of this block's rows; a part's rows lie together
    loop.close();
#pragma unroll
    for (int column = 0; column < WIDTH; column += COLUMNS) {
        if (column || !MATRIX) __syncthreads();  // what was there has been read
        loop.store(rows, column, shared, shared_top, shared_total);
        __syncthreads();
        for (int i = threadIdx.x; i < rows * (COLUMNS / 4); i += THREADS) {
            const int r = i / (COLUMNS / 4), at = i % (COLUMNS / 4) * 4, c = column + at;
            if (!FULL && c >= s.width_v) continue;
            const Joined row = join(shared_top + r, shared_total + r, shared + r * COLUMNS + place_of(r, at));
            if (alone) {
                put(r, c, row.sum, factor_of(r, row.top, row.total, c == 0));
            } else {
                const i64 mine = slot + split * ROWS + r;
                *(Few<float, 4>*)(parts + mine * WIDTH + c) = four(row.sum);
                if (c == 0) parts_top[mine] = row.top, parts_total[mine] = row.total;
            }
        }
    }
    if (alone) return;

    // The block that comes last joins the parts: 32 lanes find the weights of a row's, then all threads sum up. All that a
    // thread reads first is on its way before it waits: 9.9 us for 10.1 of the same.
    if (!arrive(arrived + pair, (u32)count, &shared_last)) return;
    constexpr int FOURS = WIDTH / 4, TEAMS = THREADS / FEWEST_LANES;
    constexpr int TEAM_ROWS = (ROWS + TEAMS - 1) / TEAMS, MINE = (ROWS * FOURS + THREADS - 1) / THREADS;
    constexpr int EACH = 16;  // parts in flight
    Few<float, 4> some[MINE][EACH];
    const auto load_some = [&](int from) {
#pragma unroll
        for (int m = 0; m < MINE; ++m) {
            const int i = threadIdx.x + m * THREADS;
            const float* at = parts + (slot + (i64)from * ROWS + i / FOURS) * WIDTH + i % FOURS * 4;
#pragma unroll
            for (int u = 0; u < EACH; ++u) {
                some[m][u].clear();
                if (from + u < count && i < rows * FOURS) some[m][u] = *(const Few<float, 4>*)(at + u * ROWS * WIDTH);
            }
        }
    };
    const int team = threadIdx.x / FEWEST_LANES, lane = threadIdx.x % FEWEST_LANES;
    float own_top[TEAM_ROWS], own_total[TEAM_ROWS];  // of the lane's first part, on their way beside other reads
#pragma unroll
    for (int n = 0; n < TEAM_ROWS; ++n) {
        const int r = team + n * TEAMS;
        const bool live = r < rows && lane < count;
        own_top[n] = live ? parts_top[slot + lane * ROWS + r] : none();
        own_total[n] = live ? parts_total[slot + lane * ROWS + r] : 0.0f;
    }
    load_some(0);
#pragma unroll
    for (int n = 0; n < TEAM_ROWS; ++n) {
        const int r = team + n * TEAMS;
        if (r >= rows) continue;
        const float *tops = parts_top + slot + r, *totals = parts_total + slot + r;
        float top = own_top[n], total = 0.0f;
#pragma unroll 1
        for (int j = lane + FEWEST_LANES; j < count; j += FEWEST_LANES) top = fmaxf(top, tops[j * ROWS]);
#pragma unroll
        for (int other = 1; other < FEWEST_LANES; other *= 2) top = fmaxf(top, SHUFFLE_XOR(top, other));
#pragma unroll 1
        for (int j = lane; j < count; j += FEWEST_LANES) {
            const float weight = exp2f((j == lane ? own_top[n] : tops[j * ROWS]) - (top == none() ? 0.0f : top));
            total += weight * (j == lane ? own_total[n] : totals[j * ROWS]);
            shared[r * count + j] = weight;
        }
#pragma unroll
        for (int other = 1; other < FEWEST_LANES; other *= 2) total += SHUFFLE_XOR(total, other);
        const float factor = factor_of(r, top, total, lane == 0);
        if (lane == 0) shared_top[r] = factor;
    }
    __syncthreads();
    float sum[MINE][4] = {};
    for (int from = 0; from < count; from += EACH) {
        if (from) load_some(from);
#pragma unroll
        for (int m = 0; m < MINE; ++m)
#pragma unroll
            for (int u = 0; u < EACH; ++u)
                if (from + u < count && threadIdx.x + m * THREADS < rows * FOURS) {
                    const float weight = shared[(threadIdx.x + m * THREADS) / FOURS * count + from + u];
#pragma unroll
                    for (int e = 0; e < 4; ++e) sum[m][e] += weight * some[m][u].get(e);
                }
    }
#pragma unroll
    for (int m = 0; m < MINE; ++m) {
        const int i = threadIdx.x + m * THREADS, r = i / FOURS, c = i % FOURS * 4;
        if (i < rows * FOURS && (FULL || c < s.width_v)) put(r, c, sum[m], shared_top[r]);
    }
}
