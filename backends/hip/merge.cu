// Partial attentions of type ELEMENT into one, by their LSE. Launch: merge.py.
#include "shim.h"

struct Strides { i64 out_token, out_head, lse_head, lse_token; };
template <int N> struct Parts { Strides of[N]; };

// A thread takes COUNT columns of one (token, head); those of a row repeat its few weights. An empty part has an LSE
// of -inf, or +inf from kernels that say so; its rows may hold NaN and are not read. A row without parts is 0, -inf.
template <int N>
DEVICE void merge_rows(const ELEMENT* const (&outs)[N], const float* const (&lses)[N], Parts<N> at, const float* sinks,
                       ELEMENT* out, float* lse, Strides to, int tokens, int heads, int width) {
    constexpr int COUNT = 16 / sizeof(ELEMENT);
    const int chunks = (width + COUNT - 1) / COUNT;
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, row = item / chunks;
    const int column = item % chunks * COUNT, token = row / heads, head = row % heads;
    if (token >= tokens) return;
    const float none = __uint_as_float(0xff800000u);
    float weight[N], top = sinks ? sinks[head] : none;
    bool wrong = top != top;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float log = lses[i] ? lses[i][head * at.of[i].lse_head + token * at.of[i].lse_token] : none;
        weight[i] = log == -none ? none : log;
        wrong |= log != log;
        top = weight[i] > top ? weight[i] : top;
    }
    const float base = top == none ? 0.0f : top;  // keeps (-inf) - (-inf) out of the exponents
    float total = sinks ? expf(sinks[head] - base) : 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) total += weight[i] = weight[i] == none ? 0.0f : expf(weight[i] - base);
    if (wrong) total = __uint_as_float(0x7fc00000);
    if (lse && column == 0) lse[head * to.lse_head + token * to.lse_token] = base + logf(total);
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    const int count = min(COUNT, width - column);
    float sum[COUNT] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (weight[i] == 0.0f) continue;
        const ELEMENT* source = outs[i] + token * at.of[i].out_token + head * at.of[i].out_head + column;
        const auto in = read<ELEMENT, COUNT>(source, count == COUNT && aligned<COUNT>(source), count, next);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) sum[j] += weight[i] * inverse * to_float(in.get(j));
    }
    ELEMENT* target = out + token * to.out_token + head * to.out_head + column;
    Few<ELEMENT, COUNT> result;
    result.clear();
#pragma unroll
    for (int j = 0; j < COUNT; ++j) result.set(j, From<ELEMENT>::value(wrong ? total : sum[j]));
    write(target, result, count == COUNT && aligned<COUNT>(target), count, next);
}

typedef const ELEMENT* Out;
typedef const float* Lse;

KERNEL merge2(Out o0, Out o1, Lse l0, Lse l1, const float* sinks, ELEMENT* out, float* lse, Parts<2> at, Strides to,
              int tokens, int heads, int width) {
    merge_rows<2>({o0, o1}, {l0, l1}, at, sinks, out, lse, to, tokens, heads, width);
}

KERNEL merge8(Out o0, Out o1, Out o2, Out o3, Out o4, Out o5, Out o6, Out o7, Lse l0, Lse l1, Lse l2, Lse l3, Lse l4,
              Lse l5, Lse l6, Lse l7, const float* sinks, ELEMENT* out, float* lse, Parts<8> at, Strides to, int tokens,
              int heads, int width) {
    merge_rows<8>({o0, o1, o2, o3, o4, o5, o6, o7}, {l0, l1, l2, l3, l4, l5, l6, l7}, at, sinks, out, lse, to, tokens,
                  heads, width);
}
