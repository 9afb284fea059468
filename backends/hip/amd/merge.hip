// Partial attentions of type ELEMENT into one, by their LSE. Launch: merge.py.
#include "shim_hip.h"

struct Strides { u32 out_token, out_head, lse_head, lse_token; };

DEVICE u64 at(u32 token, u32 token_step, u32 head, u32 head_step) {
    return (u64)token * token_step + (u64)head * head_step;
}

template <int N> struct Parts { Strides of[N]; };

// A thread takes COUNT columns of one (token, head); those of a row repeat its few weights. An empty part has an LSE
// of -inf, or +inf from kernels that say so; its rows may hold NaN, and are read beside the LSE but not used. A row
// without parts is 0, -inf.
template <int N>
DEVICE void merge_rows(const ELEMENT* const (&outs)[N], const float* const (&lses)[N], const Parts<N>& from,
                       const float* sinks, ELEMENT* out, float* lse, const Strides& to, const Items& items, int tokens,
                       int width) {
    constexpr int COUNT = 16 / sizeof(ELEMENT);
    Item item;
    if (!items.find(&item, tokens)) return;
    const int token = item.token, head = item.head, column = item.column, count = min(COUNT, width - column);
    const float none = __uint_as_float(0xff800000u);
    Few<ELEMENT, COUNT> in[N];
    float weight[N], sink = sinks ? sinks[head] : none, top = sink;
    bool wrong = top != top;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        in[i].clear();
        weight[i] = none;
        if (!outs[i]) continue;
        weight[i] = lses[i][at(token, from.of[i].lse_token, head, from.of[i].lse_head)];
        const ELEMENT* source = outs[i] + at(token, from.of[i].out_token, head, from.of[i].out_head) + column;
        in[i] = read<ELEMENT, COUNT>(source, count == COUNT && aligned<COUNT>(source), count, next);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        wrong |= weight[i] != weight[i];
        weight[i] = weight[i] == -none ? none : weight[i];
        top = weight[i] > top ? weight[i] : top;
    }
    const float base = top == none ? 0.0f : top;  // keeps (-inf) - (-inf) out of the exponents
    float total = __expf(sink - base);
#pragma unroll
    for (int i = 0; i < N; ++i) total += weight[i] = __expf(weight[i] - base);
    if (wrong) total = __uint_as_float(0x7fc00000);
    if (lse && column == 0) lse[at(token, to.lse_token, head, to.lse_head)] = base + __logf(total);
    const float inverse = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
    float sum[COUNT] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float scale = weight[i] * inverse;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) sum[j] += weight[i] == 0.0f ? 0.0f : scale * to_float(in[i].get(j));
    }
    ELEMENT* target = out + at(token, to.out_token, head, to.out_head) + column;
    Few<ELEMENT, COUNT> result;
    result.clear();
#pragma unroll
    for (int j = 0; j < COUNT; ++j) result.set(j, From<ELEMENT>::value(wrong ? total : sum[j]));
    write(target, result, count == COUNT && aligned<COUNT>(target), count, next);
}

typedef const ELEMENT* Out;
typedef const float* Lse;

KERNEL merge2(Out o0, Out o1, Lse l0, Lse l1, const float* sinks, ELEMENT* out, float* lse, int tokens, Items items,
              Parts<2> from, Strides to, int width) {
    merge_rows<2>({o0, o1}, {l0, l1}, from, sinks, out, lse, to, items, tokens, width);
}

KERNEL merge8(Out o0, Out o1, Out o2, Out o3, Out o4, Out o5, Out o6, Out o7, Lse l0, Lse l1, Lse l2, Lse l3, Lse l4,
              Lse l5, Lse l6, Lse l7, const float* sinks, ELEMENT* out, float* lse, int tokens, Items items, Parts<8> from,
              Strides to, int width) {
    merge_rows<8>({o0, o1, o2, o3, o4, o5, o6, o7}, {l0, l1, l2, l3, l4, l5, l6, l7}, from, sinks, out, lse, to, items,
                  tokens, width);
}
