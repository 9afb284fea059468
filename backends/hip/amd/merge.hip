// Partial attentions of type ELEMENT into one, by their LSE. Launch: merge.py.
#include "shim_hip.h"

struct Strides { u32 out_token, out_head, lse_head, lse_token; };

DEVICE u64 at(u32 token, u32 token_step, u32 head, u32 head_step) {
    return (u64)token * token_step + (u64)head * head_step;
}

template <int N> struct Parts { Strides of[N]; };

constexpr int COUNT = 16 / sizeof(ELEMENT);
constexpr int CHUNKS = 2;  // of a thread that merges two parts: merge.py

// C chunks of a row, `apart` columns from each other. An empty part has an LSE of -inf, or +inf from kernels that say
// so; its rows may hold NaN, and are read beside the LSE but not used. A row without parts is 0, -inf.
template <int N, int C>
DEVICE void merge_chunks(const ELEMENT* const (&sources)[N], const float* const (&lses)[N], ELEMENT* target, float* lse,
                         float sink, int column, int apart, int width, bool whole) {
    const float none = __uint_as_float(0xff800000u);
    Few<ELEMENT, COUNT> in[N][C];
    float weight[N], top = sink;
    bool wrong = top != top;
#pragma unroll
    for (int i = 0; i < N; ++i) weight[i] = sources[i] ? *lses[i] : none;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int n = 0; n < C; ++n) {
            const int c = column + n * apart;
            in[i][n].clear();
            if (sources[i] && c < width) in[i][n] = read<ELEMENT, COUNT>(sources[i] + c, whole, width - c, next);
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
    if (lse && column == 0) *lse = base + __logf(total);
    const float inverse = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
#pragma unroll
    for (int n = 0; n < C; ++n) {
        const int c = column + n * apart;
        if (c >= width) continue;
        float sum[COUNT] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float scale = weight[i] * inverse;
#pragma unroll
            for (int j = 0; j < COUNT; ++j) sum[j] += weight[i] == 0.0f ? 0.0f : scale * to_float(in[i][n].get(j));
        }
        Few<ELEMENT, COUNT> result;
        result.clear();
#pragma unroll
        for (int j = 0; j < COUNT; ++j) result.set(j, From<ELEMENT>::value(wrong ? total : sum[j]));
        write(target + c, result, whole, width - c, next);
    }
}

// A thread takes C chunks of one (token, head); those of a row repeat its few weights.
template <int N, int C>
DEVICE void merge_rows(const ELEMENT* const (&outs)[N], const float* const (&lses)[N], const Parts<N>& from,
                       const float* sinks, ELEMENT* out, float* lse, const Strides& to, const Items& items, int tokens,
                       int width) {
    Item item;
    if (!items.find(&item, tokens)) return;
    const int token = item.token, head = item.head, apart = items.chunks.divisor * COUNT;
    const float sink = sinks ? sinks[head] : __uint_as_float(0xff800000u);
    const ELEMENT* sources[N];
    const float* logs[N];
    ELEMENT* target = out + at(token, to.out_token, head, to.out_head);
    bool whole = width % COUNT == 0 && aligned<COUNT>(target);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        logs[i] = lses[i] + at(token, from.of[i].lse_token, head, from.of[i].lse_head);
        sources[i] = outs[i] ? outs[i] + at(token, from.of[i].out_token, head, from.of[i].out_head) : nullptr;
        whole &= aligned<COUNT>(sources[i]);
    }
    if (lse) lse += at(token, to.lse_token, head, to.lse_head);
    if (whole)
        merge_chunks<N, C>(sources, logs, target, lse, sink, item.column, apart, width, true);
    else
#pragma unroll 1
        for (int n = 0; n < C; ++n)
            merge_chunks<N, 1>(sources, logs, target, lse, sink, item.column + n * apart, apart, width, false);
}

typedef const ELEMENT* Out;
typedef const float* Lse;

KERNEL merge2(Out o0, Out o1, Lse l0, Lse l1, const float* sinks, ELEMENT* out, float* lse, int tokens, Items items,
              Parts<2> from, Strides to, int width) {
    merge_rows<2, CHUNKS>({o0, o1}, {l0, l1}, from, sinks, out, lse, to, items, tokens, width);
}

KERNEL merge8(Out o0, Out o1, Out o2, Out o3, Out o4, Out o5, Out o6, Out o7, Lse l0, Lse l1, Lse l2, Lse l3, Lse l4,
              Lse l5, Lse l6, Lse l7, const float* sinks, ELEMENT* out, float* lse, int tokens, Items items, Parts<8> from,
              Strides to, int width) {
    merge_rows<8, 1>({o0, o1, o2, o3, o4, o5, o6, o7}, {l0, l1, l2, l3, l4, l5, l6, l7}, from, sinks, out, lse, to, items,
                  tokens, width);
}
