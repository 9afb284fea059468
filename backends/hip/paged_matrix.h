// Keys on matrix units: a wave takes 16 at once, for up to 16 rows.
//
// A unit multiplies 16 x 16 matrices. A lane has four elements, as two words, of some lines of an operand, at the same
// places of each; a line is a row of the left operand, or a column of the right one. Of the product it has the same
// lines of the left operand, at the same four places, so that weights are an operand as they come. The order of K's
// columns is free, as long as q has the same: a lane's four are neighbours in memory. So is that of V's, which is out's.
#pragma once
#include "shim.h"

#if defined(__HIP__) || defined(__HIPCC_RTC__)
struct Unit {
    static constexpr int WAVE = 64, LINES = 1;  // of a lane
    static constexpr int APART = 16;            // lanes that have neighbouring parts of a line
    DEVICE int line(int lane, int) { return lane % 16; }
    DEVICE int part(int lane) { return lane / 16; }
    DEVICE int place(int part, int i) { return 4 * part + i; }
};
#else
struct Unit {
    static constexpr int WAVE = FEWEST_LANES, LINES = 2, APART = 1;
    DEVICE int line(int lane, int n) { return lane / 4 + 8 * n; }
    DEVICE int part(int lane) { return lane % 4; }
    DEVICE int place(int part, int i) { return 2 * part + i % 2 + i / 2 * 8; }
};
#endif
static_assert(LANES == Unit::WAVE && KEYS == 16 && (ROWS == 16 || ROWS == 8), "of a unit");

constexpr int LINES = Unit::LINES, OURS = ROWS == 8 ? 1 : LINES;  // lines of a lane that may have rows
struct Operand { u32 word[LINES][2]; };
struct Product {
    float value[4 * LINES];

    __device__ __forceinline__ float& at(int n, int i) { return value[i % 2 + 2 * n + i / 2 * 2 * LINES]; }
};

#if defined(__HIP__) || defined(__HIPCC_RTC__)
typedef float Floats __attribute__((ext_vector_type(4)));
template <typename T> struct Multiply {
    typedef _Float16 Four __attribute__((ext_vector_type(4)));
    DEVICE Floats add(Floats sum, Four a, Four b) { return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, sum, 0, 0, 0); }
};
template <> struct Multiply<bf16> {
    typedef short Four __attribute__((ext_vector_type(4)));
    DEVICE Floats add(Floats sum, Four a, Four b) { return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, sum, 0, 0, 0); }
};
DEVICE void multiply(Product& sum, const Operand& left, const Operand& right) {
    typedef Multiply<ELEMENT> M;  // which has a column of its product in a lane: its left operand is our right one
    sum = __builtin_bit_cast(Product, M::add(__builtin_bit_cast(Floats, sum), __builtin_bit_cast(M::Four, right),
                                             __builtin_bit_cast(M::Four, left)));
}
#else
// Of the compiler; the header that declares them comes with toolkits.
#define PRODUCT(name) \
    extern "C" __device__ __attribute__((device_builtin)) void name(float*, const int*, const int*, const float*, int, int)
PRODUCT(__hmma_m16n16k16_mma_f32f32);
PRODUCT(__mma_bf16_m16n16k16_mma_f32);
template <typename T> struct Multiply {
    DEVICE void add(float* sum, const int* a, const int* b) { __hmma_m16n16k16_mma_f32f32(sum, a, b, sum, 1, 0); }
};
template <> struct Multiply<bf16> {
    DEVICE void add(float* sum, const int* a, const int* b) { __mma_bf16_m16n16k16_mma_f32(sum, a, b, sum, 1, 0); }
};
DEVICE void multiply(Product& sum, const Operand& left, const Operand& right) {
    const int a[4] = {(int)left.word[0][0], (int)left.word[1][0], (int)left.word[0][1], (int)left.word[1][1]};
    const int b[4] = {(int)right.word[0][0], (int)right.word[0][1], (int)right.word[1][0], (int)right.word[1][1]};
    Multiply<ELEMENT>::add(sum.value, a, b);
}
#endif

constexpr int VECTORS = WIDTH / VEC;  // of a row of V. Each is of a line, or its halves are of two, 8 apart
constexpr int TILES = WIDTH / 16;     // of V: a line has the j-th column of its vector, or half, in the j-th
constexpr int V_LOADS = VECTORS == 16 ? LINES : 1;
static_assert(VECTORS == 16 || VECTORS == 8, "a vector is of one line or two");

DEVICE u32 lows(u32 a, u32 b) { return (a & 0xffff) | b << 16; }
DEVICE u32 highs(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }

// What a lane has of the operands: the e-th four of a vector of K, the j-th columns of two vectors of V.
template <typename T> struct Words {
    static constexpr int DROP = 0, LIFT = 0;
    DEVICE void prepare(Few<ELEMENT, 8>&) {}
    DEVICE void of_key(const Vector& few, int e, u32 (&to)[2]) { to[0] = few.word[2 * e], to[1] = few.word[2 * e + 1]; }
    DEVICE u32 of_values(const Vector& a, const Vector& b, bool upper, int j) {
        const int i = j / 2 % (VECTORS / 4);
        const u32 x = VECTORS == 8 && upper ? a.word[i + 2] : a.word[i];
        const u32 y = VECTORS == 8 && upper ? b.word[i + 2] : b.word[i];
        return j % 2 ? highs(x, y) : lows(x, y);
    }
};
// Bytes become ELEMENTs that are 2**DROP times too small, by moving their bits. q and weights are 2**LIFT times too
// large, so that products stay normal numbers. A vector with a NaN among its bytes has more of them.
template <bool FNUZ> struct WordsOfBytes {
    static constexpr int BIAS = From<ELEMENT>::BIAS;
    static constexpr int DROP = BIAS - (FNUZ ? 8 : 7), LIFT = BIAS == 127 ? 60 : 0;
    static constexpr int MOVE = BIAS == 127 ? 4 : 1;
    static constexpr u32 REST = 0x7f007f00 >> MOVE;  // exponents and mantissas
    // the upper byte of each half, and bits that make them NaN
    DEVICE u32 uppers(u32 word, u32 nan) { return ((word & 0x80008000) | nan) | (word >> MOVE & REST); }
    DEVICE u32 nan_of(const Vector& few) { return any_nan<FNUZ>(few) ? 0x7fff : 0; }
    // elements 0 to 3 of each four in the order of `of_key`: 0, 2, 1, 3
    DEVICE void prepare(Few<ELEMENT, 8>& few) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const u32 a = few.word[i], b = few.word[i + 1];
            few.word[i] = lows(a, b), few.word[i + 1] = highs(a, b);
        }
        if (!LIFT) return;
        const Few<ELEMENT, 8> old = few;
        few.clear();
#pragma unroll
        for (int i = 0; i < 8; ++i) few.set(i, From<ELEMENT>::value(to_float(old.get(i)) * power(LIFT)));
    }
    DEVICE void of_key(const Vector& few, int e, u32 (&to)[2]) {
        to[0] = uppers(few.word[e] << 8, e ? 0 : nan_of(few)), to[1] = uppers(few.word[e], 0);
    }
    DEVICE u32 of_values(const Vector& a, const Vector& b, bool upper, int j) {
        const u32 x = upper ? a.word[j / 4 + 2] : a.word[j / 4], y = upper ? b.word[j / 4 + 2] : b.word[j / 4];
        const u32 both = j / 2 % 2 ? highs(x, y) : lows(x, y);
        return uppers(j % 2 ? both : both << 8, nan_of(a) | nan_of(b) << 16);
    }
};
template <> struct Words<e4m3fn> : WordsOfBytes<false> {};
template <> struct Words<e4m3fnuz> : WordsOfBytes<true> {};
typedef Words<STORED> As;

// A weight that is not negative, rounded; half of a step goes up.
template <typename T> DEVICE u32 pair(float a, float b) { return From<T>::value(a).bits | (u32)From<T>::value(b).bits << 16; }
template <> __device__ __forceinline__ u32 pair<bf16>(float a, float b) {  // NaN may have all bits
    const u32 most = 0x7fffffff;
    return highs(min(__float_as_uint(a) + 0x8000, most), min(__float_as_uint(b) + 0x8000, most));
}

struct Loop {
    static constexpr int MINE = 1;  // a lane finds one row of K or V; those whose columns it has come from other lanes
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, part = Unit::part(lane);
    int page[1];
    Vector key[LINES][LOADS], value[4][V_LOADS];
    Product sum[TILES];
    float top[OURS], total[OURS];  // of rows; each lane has a part of the totals

    __device__ __forceinline__ int key_of(int) const { return group * KEYS + lane % KEYS; }  // in a turn
    __device__ __forceinline__ u64 find(const Block& b, int begin) const {
        const bool second = lane / KEYS % 2;
        const Pages where = {second ? b.v_at.page : b.k_at.page, second ? b.v_at.offset : b.k_at.offset, 0};
        return b.row_of(where, page[0], begin + key_of(0));
    }
    DEVICE u64 row(u64 found, int from) {
        constexpr int bits = 8 * sizeof(u32);
        return (u64)SHUFFLE((u32)(found >> bits), from, LANES) << bits | SHUFFLE((u32)found, from, LANES);
    }
    __device__ __forceinline__ void load_keys(const Block& b, u64 found) {
#pragma unroll
        for (int n = 0; n < LINES; ++n) {
            const STORED* from = b.k + row(found, Unit::line(lane, n));
#pragma unroll
            for (int x = 0; x < LOADS; ++x) b.load(key[n][x], from, (4 * x + part) * VEC, b.s.width_k);
        }
    }
    __device__ __forceinline__ void load_values(const Block& b, u64 found) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const STORED* from = b.v + row(found, KEYS + Unit::place(part, i));
#pragma unroll
            for (int n = 0; n < V_LOADS; ++n)
                b.load(value[i][n], from, Unit::line(lane, n) % VECTORS * VEC, b.s.width_v);
        }
    }

    // in the order of K's columns
    __device__ __forceinline__ void load_queries(const Block& b, Operand (&query)[LOADS][VEC / 4], bool whole) {
        Few<ELEMENT, 8> few[LINES][LOADS * VEC / 8];
#pragma unroll
        for (int n = 0; n < LINES; ++n) {
            const ELEMENT* from = b.query(min(Unit::line(lane, n), b.rows - 1));  // what other rows give is unused
#pragma unroll
            for (int x = 0; x < LOADS * VEC / 8; ++x) {
                const int c = (x * 8 / VEC * 4 + part) * VEC + x * 8 % VEC;
                few[n][x].clear();
                if (n < OURS && (FULL || c < b.s.width_k)) few[n][x] = read<ELEMENT, 8>(from + c, whole, 8, next);
            }
        }
#pragma unroll
        for (int n = 0; n < LINES; ++n)
#pragma unroll
            for (int x = 0; x < LOADS * VEC / 8; ++x) {
                As::prepare(few[n][x]);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    query[x * 8 / VEC][x * 8 % VEC / 4 + i / 2].word[n][i % 2] = few[n][x].word[i];
            }
    }

    __device__ __forceinline__ void run(const Block& b, float factor, float*) {
        u64 found = 0;
        if (b.first < b.end) {
            found = find(b, b.first);
            load_keys(b, found);
            load_values(b, found);
            page[0] = b.page_of(b.first + STEP + key_of(0));
        }
        Operand query[LOADS][VEC / 4];
        int token[OURS];
        // asked once: with both ways to read beside each other, each of the reads waits for the one before
        if (aligned<8>(b.q) && b.at.q_token % 8 == 0 && b.at.q_head % 8 == 0) load_queries(b, query, true);
        else load_queries(b, query, false);
#pragma unroll
        for (int n = 0; n < OURS; ++n) token[n] = b.nth(Unit::line(lane, n));
        factor *= power(As::DROP - As::LIFT);
#pragma unroll
        for (Product& each : sum) each = {};
#pragma unroll
        for (int n = 0; n < OURS; ++n) top[n] = none(), total[n] = 0.0f;
        // K of the next turn is loaded as soon as this turn's is multiplied, and V likewise.
        for (int begin = b.first; begin < b.end; begin += STEP) {
            Product score = {};
#pragma unroll
            for (int x = 0; x < LOADS; ++x)
#pragma unroll
                for (int e = 0; e < VEC / 4; ++e) {
                    Operand right;
#pragma unroll
                    for (int n = 0; n < LINES; ++n) As::of_key(key[n][x], e, right.word[n]);
                    multiply(score, query[x][e], right);
                }
            const bool more = begin + STEP < b.end;
            if (more) {
                found = find(b, begin + STEP);
                load_keys(b, found);
                page[0] = b.page_of(begin + 2 * STEP + key_of(0));
            }
            const bool masked = begin < b.all_first || begin + STEP > b.all_end;
            float highest[OURS];
            bool higher = false;
#pragma unroll
            for (int n = 0; n < OURS; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) score.at(n, i) *= factor;
                if (b.softcap != 0.0f)
#pragma unroll
                    for (int i = 0; i < 4; ++i) score.at(n, i) = b.softcap * tanhf(score.at(n, i));
                if (masked)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (!b.sees(token[n], begin + group * KEYS + Unit::place(part, i))) score.at(n, i) = none();
                highest[n] = fmaxf(fmaxf(score.at(n, 0), score.at(n, 1)), fmaxf(score.at(n, 2), score.at(n, 3)));
                higher |= highest[n] > top[n] + SLACK;
            }
            if (ANY(higher)) raise(highest);
            Operand weights;
#pragma unroll
            for (int n = 0; n < LINES; ++n) {
                if (n >= OURS) {
                    weights.word[n][0] = weights.word[n][1] = 0;
                    continue;
                }
                const float base = (top[n] == none() ? 0.0f : top[n]) - As::LIFT;  // no (-inf) - (-inf)
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const float x = exp2f(score.at(n, i) - base), y = exp2f(score.at(n, i + 1) - base);
                    total[n] += x + y;
                    weights.word[n][i / 2] = pair<ELEMENT>(x, y);
                }
            }
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                Operand right;
#pragma unroll
                for (int n = 0; n < LINES; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        right.word[n][i] = As::of_values(value[2 * i][n % V_LOADS], value[2 * i + 1][n % V_LOADS],
                                                         Unit::line(lane, n) >= 8, j);
                multiply(sum[j], weights, right);
            }
            if (more) load_values(b, found);
        }
    }

    // All lanes of a row take the same top, where one has a score that is much higher.
    __device__ __forceinline__ void raise(float (&highest)[OURS]) {
#pragma unroll
        for (int n = 0; n < OURS; ++n) {
#pragma unroll
            for (int other = Unit::APART; other < 4 * Unit::APART; other *= 2)
                highest[n] = fmaxf(highest[n], SHUFFLE_XOR(highest[n], other));
            const float raised = highest[n] > top[n] + SLACK ? highest[n] : top[n];
            const float shrink = raised == top[n] ? 1.0f : exp2f(top[n] - raised);
            top[n] = raised, total[n] *= shrink;
#pragma unroll
            for (Product& each : sum)
#pragma unroll
                for (int i = 0; i < 4; ++i) each.at(n, i) *= shrink;
        }
    }

    __device__ __forceinline__ void close() {
#pragma unroll
        for (int n = 0; n < OURS; ++n)
#pragma unroll
            for (int other = Unit::APART; other < 4 * Unit::APART; other *= 2)
                total[n] += SHUFFLE_XOR(total[n], other);
    }

    // The columns that start at `column`.
    __device__ __forceinline__ void store(int rows, int column, float* sums, float* tops, float* totals) {
#pragma unroll
        for (int n = 0; n < OURS; ++n) {
            const int r = Unit::line(lane, n), at = group * ROWS + r;
            if (r >= rows) continue;
            if (part == 0) tops[at] = top[n], totals[at] = total[n];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int line = Unit::place(part, i), c = line % VECTORS * VEC + line / VECTORS * TILES - column;
#pragma unroll
                for (int j = 0; j < TILES; j += 4) {
                    const float some[4] = {sum[j].at(n, i), sum[j + 1].at(n, i), sum[j + 2].at(n, i),
                                           sum[j + 3].at(n, i)};
                    if (COLUMNS == WIDTH || (c >= 0 && c < COLUMNS))
                        *(Few<float, 4>*)(sums + at * COLUMNS + place_of(r, c + j)) = four(some);
                }
            }
        }
    }
};
