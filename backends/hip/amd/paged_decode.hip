#include "hip/hip_runtime.h"
// Attention of a few query tokens over the pages of a cache, split over the keys. Launch: paged_decode.py.
//
// A key's row is read by LANES lanes, LOADS vectors of VEC elements each, so that a block of THREADS reads
// THREADS / LANES keys at once, KEYS times per turn; the ROWS rows of a block are (query token, query head) pairs that
// share the KV head, so that each key is read once for all of them. ELEMENT is the type of q and out, STORED that of
// the cache. VECTOR: its rows start at multiples of VEC elements. FULL: K and V are as wide as all lanes are. Nothing
// depends on how many lanes a wave has, beyond LANES dividing it.
#include "shim_hip.h"

#define MOST_WAVES (THREADS / FEWEST_LANES)

constexpr int PER_LANE = LOADS * VEC, WIDTH = LANES * PER_LANE, GROUPS = THREADS / LANES, STEP = GROUPS * KEYS;

// In elements; one page, and one token of it, are within 2**31 of its start.
struct Pages { u32 page, offset; i64 head; };
struct Sizes { int heads, group, width_k, width_v; Divide page; int row_blocks; };
struct Strides { i64 q_token, q_head, out_token, out_head, lse_head, lse_token; };
struct Mask { int left, right; };
struct Scores { float factor, softcap; };  // in units of log2; softcap 0: none

DEVICE float none() { return __uint_as_float(0xff800000u); }
DEVICE int cdiv(int a, int b) { return (a + b - 1) / b; }

// of a lane's i-th element
DEVICE int column(int lane, int i) { return i / VEC * LANES * VEC + lane * VEC + i % VEC; }

// A row's softmax so far: the highest score (or one that is at most SLACK below it), the sum of weights.
#define SLACK 8.0f  // in units of log2: sums are rescaled only when the highest score rises by more than 2**SLACK

DEVICE void finish(ELEMENT* out, float* lse, Strides at, int token, int head, int column, float result, float log) {
    out[token * at.out_token + head * at.out_head + column] = From<ELEMENT>::value(result);
    if (lse && column == 0) lse[head * at.lse_head + token * at.lse_token] = log * 0.69314718f;
}

KERNEL __launch_bounds__(THREADS, BLOCKS)
attend(const ELEMENT* q, const STORED* k_pages, const STORED* v_pages, const int* table, const int* cu_seqlens_q,
       const int* seq_lens, const u8* causal, const float* k_scale, const float* v_scale, const float* sinks,
       ELEMENT* out, float* lse, float* parts, float* parts_lse, u32* arrived, i64 table_step, int pairs,
       int least_chunk, int splits, Strides at, Pages k_at, Pages v_at, Sizes s, Mask mask, Scores scores, int k_step,
       int v_step) {
    typedef Few<STORED, VEC> Vector;
    // q, then what the waves have summed, then what the parts have
    constexpr int SUMS = MOST_WAVES * ROWS * WIDTH;
    __shared__ float shared[SUMS > THREADS * 4 ? SUMS : THREADS * 4];
    __shared__ float shared_top[MOST_WAVES][ROWS], shared_total[MOST_WAVES][ROWS];
    __shared__ int shared_last;
    const int kv_heads = s.heads / s.group;
    const int pair = blockIdx.x % pairs, split = blockIdx.x / pairs;  // of some rows of a KV head, and some keys
    const int row_block = pair % s.row_blocks, kv_head = pair / s.row_blocks % kv_heads;
    const int request = pair / s.row_blocks / kv_heads;
    const int token = cu_seqlens_q[request], queries = cu_seqlens_q[request + 1] - token;
    const int length = seq_lens[request], first_row = row_block * ROWS;
    const int rows = min(queries * s.group - first_row, ROWS);
    if (rows <= 0) return;
    if (causal) mask.right = causal[request] ? 0 : mask.right;
    // the keys that any row of the request sees, and of these a part
    const i64 position = (i64)length - queries;  // of the first query token
    int first = (int)max(position - mask.left, (i64)0), end = (int)min((i64)length + mask.right, (i64)length);
    const int chunk = max(least_chunk, cdiv(cdiv(end - first, splits), STEP) * STEP);
    const int count = end > first ? cdiv(end - first, chunk) : 1;  // parts
    first += split * chunk;
    if (split >= count) return;  // the first part is there even where no key is
    end = min(end, first + chunk);

    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const STORED* k_base = k_pages + kv_head * k_at.head + (FULL ? lane * VEC : 0);
    const STORED* v_base = v_pages + kv_head * v_at.head + (FULL ? lane * VEC : 0);
    const int* pages = table + request * table_step;
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

    // What is read first: pages, then q, then K and V, so that these waits are two and not three.
    int page[KEYS], ahead[KEYS];
#pragma unroll
    for (int n = 0; n < KEYS; ++n) page[n] = first < end ? page_of(first + group + n * GROUPS) : 0;
    constexpr int SHARE = (ROWS * WIDTH + THREADS - 1) / THREADS;  // of q
    float loaded[SHARE];
#pragma unroll
    for (int n = 0; n < SHARE; ++n) {
        const int i = threadIdx.x + n * THREADS, row = i / WIDTH + first_row, c = i % WIDTH;
        const int head = kv_head * s.group + row % s.group;
        const bool live = i / WIDTH < rows && (FULL || c < s.width_k);
        loaded[n] = live ? to_float(q[(token + row / s.group) * at.q_token + head * at.q_head + c]) : 0.0f;
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
    const float factor = scores.factor * (k_scale ? k_scale[kv_head * k_step] : 1.0f);
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
    const i64 all_first = position + (first_row + rows - 1) / s.group - mask.left;
    const i64 all_end = min(position + first_row / s.group + mask.right + 1, (i64)end);

    // The scores of a turn, [ROWS][KEYS], are dealt to the lanes: a lane sums up OWN of them, whole, of one row. Where
    // there are fewer scores than lanes, COPIES of these have the same.
    constexpr int ALL = ROWS * KEYS, OWN = ALL > LANES ? ALL / LANES : 1, COPIES = ALL < LANES ? LANES / ALL : 1;
    static_assert(KEYS % OWN == 0, "a lane has scores of one row");
    const int own = lane / COPIES * OWN, own_row = first_row + own / KEYS;  // the first of a lane's
    const int ahead_of = own_row / s.group;  // query tokens
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
        for (int i = 0; i < ALL; ++i) score[i] = 0.0f;
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
                        score[r * KEYS + n] += few.get(e) * to_float(key[n][(i + e) / VEC].get((i + e) % VEC));
            }
#else
#pragma unroll
        for (int n = 0; n < KEYS; ++n)
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const float k = to_float(key[n][i / VEC].get(i % VEC));
#pragma unroll
                for (int r = 0; r < ROWS; ++r) score[r * KEYS + n] += query[r][i] * k;
            }
#endif
        const bool more = begin + STEP < end;
        if (more) {
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                load(key[n], k_base + row_of(k_at, page[n], mine + STEP + n * GROUPS), s.width_k);
                ahead[n] = page_of(mine + 2 * STEP + n * GROUPS);
            }
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
            for (int other = COPIES; other < KEYS / OWN * COPIES; other *= 2)
                highest = fmaxf(highest, SHUFFLE_XOR(highest, other));
            const float raised = highest > top + SLACK ? highest : top;
            const float shrink = raised == top ? 1.0f : exp2f(top - raised);
            top = raised, total *= shrink;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const float row_shrink = SHUFFLE(shrink, r * KEYS / OWN * COPIES, LANES);
#pragma unroll
                for (int i = 0; i < PER_LANE; ++i) sum[r][i] *= row_shrink;
            }
        }
        const float base = top == none() ? 0.0f : top;  // keeps (-inf) - (-inf) out of the exponents
        float weight[OWN];
#pragma unroll
        for (int i = 0; i < OWN; ++i) total += weight[i] = exp2f(score[i] - base);
#pragma unroll
        for (int n = 0; n < KEYS; ++n) {
            float shares[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                shares[r] = SHUFFLE(weight[(r * KEYS + n) % OWN], (r * KEYS + n) / OWN * COPIES, LANES);
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) {
                const float v = to_float(value[n][i / VEC].get(i % VEC));
#pragma unroll
                for (int r = 0; r < ROWS; ++r) sum[r][i] += shares[r] * v;
            }
            if (more) {
                load(value[n], v_base + row_of(v_at, page[n], mine + STEP + n * GROUPS), s.width_v);
                page[n] = ahead[n];
            }
        }
    }

    // The lanes of a row, the groups of a wave, then the waves of the block.
    const int wave = threadIdx.x / warpSize, waves = THREADS / warpSize;
#pragma unroll
    for (int other = COPIES; other < KEYS / OWN * COPIES; other *= 2) total += SHUFFLE_XOR(total, other);
    __syncthreads();  // q was there
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float row_top = SHUFFLE(top, r * KEYS / OWN * COPIES, LANES);
        float row_total = SHUFFLE(total, r * KEYS / OWN * COPIES, LANES);
        for (int other = LANES; other < warpSize; other *= 2) {
            const float theirs = SHUFFLE_XOR(row_top, other), highest = fmaxf(row_top, theirs);
            const float base = highest == none() ? 0.0f : highest;
            const float mine = exp2f(row_top - base), yours = exp2f(theirs - base);
            row_total = row_total * mine + SHUFFLE_XOR(row_total, other) * yours;
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i)
                sum[r][i] = sum[r][i] * mine + SHUFFLE_XOR(sum[r][i], other) * yours;
            row_top = highest;
        }
        if (threadIdx.x % warpSize == 0) shared_top[wave][r] = row_top, shared_total[wave][r] = row_total;
        if (threadIdx.x % warpSize < LANES)
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) shared[(wave * ROWS + r) * WIDTH + column(lane, i)] = sum[r][i];
    }
    __syncthreads();
    const bool alone = count == 1;
    const i64 first_slot = (i64)pair * splits * ROWS;  // of this block's rows, a part's rows together
    for (int i = threadIdx.x; i < rows * WIDTH; i += THREADS) {
        const int r = i / WIDTH, c = i % WIDTH, row = first_row + r, head = kv_head * s.group + row % s.group;
        if (!FULL && c >= s.width_v) continue;
        const float sink = alone && sinks ? sinks[head] * 1.44269504f : none();
        float highest = sink;
        for (int w = 0; w < waves; ++w) highest = fmaxf(highest, shared_top[w][r]);
        const float base = highest == none() ? 0.0f : highest;
        float weight = exp2f(sink - base), result = 0.0f;
        for (int w = 0; w < waves; ++w) {
            const float scale = exp2f(shared_top[w][r] - base);
            weight += shared_total[w][r] * scale;
            result += shared[(w * ROWS + r) * WIDTH + c] * scale;
        }
        result = weight == 0.0f ? 0.0f : result / weight * (v_scale ? v_scale[kv_head * v_step] : 1.0f);
        const float log = weight == 0.0f ? none() : base + log2f(weight);
        if (alone) {
            finish(out, lse, at, token + row / s.group, head, c, result, log);
        } else {
            const i64 slot = first_slot + split * ROWS + r;
            parts[slot * WIDTH + c] = result;
            if (c == 0) parts_lse[slot] = log;
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
    constexpr int FOURS = ROWS * WIDTH / 4, TEAMS = FOURS < THREADS ? THREADS / FOURS : 1, UNROLL = 16;
    const int team = TEAMS > 1 ? threadIdx.x / FOURS : 0;
    __shared__ float team_top[TEAMS * FOURS], team_total[TEAMS * FOURS];
#pragma unroll
    for (int four = threadIdx.x % (FOURS < THREADS ? FOURS : THREADS); four < FOURS; four += THREADS) {
        const int r = four / (WIDTH / 4), c = four % (WIDTH / 4) * 4;
        const float* from = parts + (first_slot + r) * WIDTH + c;
        const float* logs = parts_lse + first_slot + r;
        float top = none(), total = 0.0f, sum[4] = {};
        for (int i = team; i < count; i += TEAMS * UNROLL) {
            Few<float, 4> part[UNROLL];
            float log[UNROLL], highest = top;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const int nth = i + u * TEAMS;
                const bool there = nth < count && r < rows && (FULL || c < s.width_v);
                log[u] = there ? logs[nth * ROWS] : none();
                part[u].clear();
                if (there) part[u] = *(const Few<float, 4>*)(from + (i64)nth * ROWS * WIDTH);
            }
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) highest = fmaxf(highest, log[u]);
            const float base = highest == none() ? 0.0f : highest, shrink = exp2f(top - base);
            top = highest, total *= shrink;
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] *= shrink;
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float weight = exp2f(log[u] - base);
                total += weight;
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[e] += weight * part[u].get(e);
            }
        }
        const int mine = team * FOURS + four;
        team_top[mine] = top, team_total[mine] = total;
#pragma unroll
        for (int e = 0; e < 4; ++e) shared[mine * 4 + e] = sum[e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * WIDTH; i += THREADS) {
        const int r = i / WIDTH, c = i % WIDTH, row = first_row + r, head = kv_head * s.group + row % s.group;
        if (!FULL && c >= s.width_v) continue;
        const float sink = sinks ? sinks[head] * 1.44269504f : none();
        float highest = sink;
#pragma unroll
        for (int t = 0; t < TEAMS; ++t) highest = fmaxf(highest, team_top[t * FOURS + i / 4]);
        const float base = highest == none() ? 0.0f : highest;
        float weight = exp2f(sink - base), result = 0.0f;
#pragma unroll
        for (int t = 0; t < TEAMS; ++t) {
            const float scale = exp2f(team_top[t * FOURS + i / 4] - base);
            weight += team_total[t * FOURS + i / 4] * scale;
            result += shared[t * FOURS * 4 + i] * scale;
        }
        finish(out, lse, at, token + row / s.group, head, c, weight == 0.0f ? 0.0f : result / weight,
               weight == 0.0f ? none() : base + log2f(weight));
    }
}
