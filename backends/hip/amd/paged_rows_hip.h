#include "hip/hip_runtime.h"
// Keys on vector units: LANES lanes have one each of KEYS, LOADS vectors of it each, and multiply it with all rows.
// Nothing depends on how many lanes a wave has, beyond LANES dividing it.
#pragma once
#include "shim_hip.h"

constexpr int PER_LANE = LOADS * VEC;

// Elements of a vector in float32, exactly, but for a power of two: each is 2**DROP times too small. Weights are 2**LIFT
// times too large, so that products stay normal numbers. A vector with a NaN among bytes is all NaN.
template <typename T> struct Read {
    static constexpr int DROP = 0, LIFT = 0;
    DEVICE float get(const Vector& few, int i) { return to_float(few.get(i)); }
    DEVICE float nan_or_zero(const Vector&) { return 0.0f; }
};
template <bool FNUZ> struct ReadBytes {
    static constexpr int DROP = FNUZ ? 119 : 120, LIFT = 60;
    // sign, exponent and mantissa where float32 has them
    DEVICE float get(const Vector& few, int i) {
        return __uint_as_float((u32)((int)(few.word[i / 4] << (24 - i % 4 * 8)) >> 4) & 0x87f00000);
    }
    DEVICE float nan_or_zero(const Vector& few) { return any_nan<FNUZ>(few) ? __uint_as_float(0x7fc00000) : 0.0f; }
};
template <> struct Read<e4m3fn> : ReadBytes<false> {};
template <> struct Read<e4m3fnuz> : ReadBytes<true> {};
typedef Read<STORED> As;

// of a lane's i-th element
DEVICE int column(int lane, int i) { return i / VEC * LANES * VEC + lane * VEC + i % VEC; }

struct Loop {
    static constexpr int MINE = KEYS;
    // The scores of a turn, [ROWS][KEYS], are dealt to the lanes: a lane sums up OWN of them, whole, of one row. Where
    // there are fewer scores than lanes, COPIES of these have the same.
    static constexpr int ALL = ROWS * KEYS, OWN = ALL > LANES ? ALL / LANES : 1, COPIES = ALL < LANES ? LANES / ALL : 1;
    static constexpr int OF_ROW = LANES / ROWS;  // lanes
    static_assert(KEYS % OWN == 0, "a lane has scores of one row");
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    int page[KEYS], ahead[KEYS];
    Vector key[KEYS][LOADS], value[KEYS][LOADS];
    float sum[ROWS][PER_LANE], top = none(), total = 0.0f;  // top and total: of the lane's row, over its scores

    __device__ __forceinline__ int key_of(int n) const { return group + n * GROUPS; }  // in a turn
    __device__ __forceinline__ void load_keys(const Block& b, int begin) {
#pragma unroll
        for (int n = 0; n < KEYS; ++n)
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                b.load(key[n][i], b.k + b.row_of(b.k_at, page[n], begin + key_of(n)), column(lane, i * VEC), b.s.width_k);
    }
    __device__ __forceinline__ void load_value(const Block& b, int n, int begin) {
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            b.load(value[n][i], b.v + b.row_of(b.v_at, page[n], begin + key_of(n)), column(lane, i * VEC), b.s.width_v);
    }

    __device__ __forceinline__ void run(const Block& b, float factor, float* shared) {
        constexpr int SHARE = (ROWS * WIDTH + THREADS - 1) / THREADS;  // of q
        float loaded[SHARE];
#pragma unroll
        for (int n = 0; n < SHARE; ++n) {
            const int i = threadIdx.x + n * THREADS, r = i / WIDTH, c = i % WIDTH;
            const bool live = r < b.rows && (FULL || c < b.s.width_k);
            loaded[n] = live ? to_float(b.query(r)[c]) : 0.0f;
        }
        if (b.first < b.end) {
            load_keys(b, b.first);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) load_value(b, n, b.first);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) page[n] = b.page_of(b.first + STEP + key_of(n));
        }
        factor *= power(As::LIFT);
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
        const int own = lane / COPIES * OWN, token = b.nth(own / KEYS);  // the first of a lane's scores
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < PER_LANE; ++i) sum[r][i] = 0.0f;
        // K of the next turn is loaded as soon as this turn's is multiplied, and V likewise.
        for (int begin = b.first; begin < b.end; begin += STEP) {
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
            const bool more = begin + STEP < b.end;
            if (more) load_keys(b, begin + STEP);
#pragma unroll
            for (int n = 0; n < KEYS; ++n) ahead[n] = more ? b.page_of(begin + 2 * STEP + key_of(n)) : 0;
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
            if (b.softcap != 0.0f)
#pragma unroll
                for (int i = 0; i < OWN; ++i) score[i] = b.softcap * tanhf(score[i]);
            if (begin < b.all_first || begin + STEP > b.all_end)
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (!b.sees(token, begin + key_of(own % KEYS + i))) score[i] = none();
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
                if (more) load_value(b, n, begin + STEP);
                page[n] = ahead[n];
            }
        }
    }

    __device__ __forceinline__ void close() {
#pragma unroll
        for (int other = COPIES; other < OF_ROW; other *= 2) total += SHUFFLE_XOR(total, other);
    }
    __device__ __forceinline__ void store(int, int, float* sums, float* tops, float* totals) {
        static_assert(COLUMNS == WIDTH, "all columns are stored at once");
        if (lane % OF_ROW == 0) tops[group * ROWS + lane / OF_ROW] = top, totals[group * ROWS + lane / OF_ROW] = total;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int i = 0; i < PER_LANE; i += 4)
                *(Few<float, 4>*)(sums + (group * ROWS + r) * WIDTH + place_of(r, column(lane, i))) = four(sum[r] + i);
    }
};
