// Rows into the pages of a cache and back, in every layout: an address is page, the token's offset in two digits, the
// head, and the column in two digits. ROW is the type of rows, STORED that of the cache. Launch: cache.py.
#include "shim.h"

// In elements. Plain layouts have one digit of each; packed ones put `packed` columns or offsets last.
struct Digits { i64 page, offset, offset_low, head, column, column_low; };
struct Rows { i64 token, head; };
struct Sizes { int width, packed_offset, packed_column; };

constexpr int COUNT = 16 / sizeof(ROW);  // columns of a chunk
constexpr int CHUNKS = 2;                // that a thread gathers: cache.py

// Of a row's first column.
DEVICE i64 row_of(const Digits& at, const Sizes& s, i64 page, int offset, int head) {
    return page * at.page + head * at.head +
           (s.packed_offset > 1 ? offset / s.packed_offset * at.offset + offset % s.packed_offset * at.offset_low
                                : offset * at.offset);
}

DEVICE i64 column_of(const Digits& at, const Sizes& s, int column) {  // from its row's first
    if (s.packed_column == 1) return column * at.column;
    return column / s.packed_column * at.column + column % s.packed_column * at.column_low;
}

DEVICE bool together(const Digits& at, const Sizes& s) {  // whether the columns of a chunk are neighbours
    return s.packed_column == 1 ? at.column == 1 : at.column_low == 1 && s.packed_column % COUNT == 0;
}

DEVICE i64 step(const Digits& at, const Sizes& s, int column, int i) {  // from a chunk's first column to its i-th
    if (s.packed_column == 1) return i * at.column;
    const int low = column % s.packed_column + i;
    return low / s.packed_column * at.column + (low % s.packed_column - column % s.packed_column) * at.column_low;
}

// A row is read before it is known whether its slot is one, so that the two waits are one.
DEVICE void write_rows(const ROW* rows, STORED* pages, const void* slots, bool wide, const float* scale,
                       int scale_step, int tokens, const Items& items, const Rows& from, const Digits& to,
                       const Sizes& s, Divide page_size, i64 capacity) {
    Item item;
    if (!items.find(&item, tokens)) return;
    const i64 slot = wide ? ((const i64*)slots)[item.token] : ((const int*)slots)[item.token];
    const int count = min(COUNT, s.width - item.column);
    const ROW* source = rows + item.token * from.token + item.head * from.head + item.column;
    const auto in = read<ROW, COUNT>(source, count == COUNT && aligned<COUNT>(source), count, next);
    const float divisor = sizeof(STORED) == 1 && scale ? scale[item.head * scale_step] : 1.0f;
    CHECK(slot < capacity);
    if (slot < 0 || slot >= capacity) return;
    const i64 page = capacity >> 31 ? slot / page_size.divisor : page_size.of((int)slot);
    STORED* target = pages + row_of(to, s, page, (int)(slot - page * page_size.divisor), item.head) +
                     column_of(to, s, item.column);
    Few<STORED, COUNT> out;
    out.clear();
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        out.set(i, convert<STORED>(in.get(i), [&](float x) { return sizeof(STORED) == 1 ? x / divisor : x; }));
    write(target, out, count == COUNT && together(to, s) && aligned<COUNT>(target), count,
          [&](int i) { return step(to, s, item.column, i); });
}

// N chunks of a row, `apart` columns from each other: all are asked for before the first is used. No source: zeros.
template <int N>
DEVICE void gather_chunks(const STORED* source, ROW* target, int column, int apart, bool whole, float factor,
                          const Digits& from, const Sizes& s) {
    Few<STORED, COUNT> in[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int c = column + n * apart;
        in[n].clear();
        if (source && c < s.width)
            in[n] = read<STORED, COUNT>(source + column_of(from, s, c), whole, s.width - c,
                                        [&](int i) { return step(from, s, c, i); });
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int c = column + n * apart;
        if (c >= s.width) continue;
        Few<ROW, COUNT> out;
        out.clear();
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            out.set(i, convert<ROW>(in[n].get(i), [&](float x) { return sizeof(STORED) == 1 ? x * factor : x; }));
        write(target + c, out, whole, s.width - c, next);
    }
}

// By binary search of the token's request.
DEVICE void gather_rows(const STORED* pages, ROW* rows, const float* scale, int scale_step, const int* cu_seqlens_k,
                        const int* block_table, i64 table_step, int num_rows, const Items& items, const Digits& from,
                        const Sizes& s, int heads, int requests, Divide page_size, int num_pages) {
    Item item;
    if (!items.find(&item, num_rows)) return;
    const STORED* source = nullptr;
    float factor = 1.0f;
    const int last = cu_seqlens_k[requests];  // on its way beside the search
    int request = 0, start = 0;
    for (int beyond = requests; beyond - request > 1;) {
        const int middle = (request + beyond) / 2, at = cu_seqlens_k[middle];
        if (at <= item.token) request = middle, start = at;
        else beyond = middle;
    }
    if (item.token < last) {  // else the host's lengths are bounds: 0 beyond the last row
        const int position = item.token - start, nth = page_size.of(position);
        const i64 page = block_table[request * table_step + nth];
        CHECK(page >= 0 && page < num_pages);
        source = pages + row_of(from, s, page, position - nth * page_size.divisor, item.head);
        if (sizeof(STORED) == 1 && scale) factor = scale[item.head * scale_step];
    }
    ROW* target = rows + ((i64)item.token * heads + item.head) * s.width;
    const int apart = items.chunks.divisor * COUNT;
    const bool steady = s.packed_column == 1 || from.column % COUNT == 0;  // all of a row's chunks are aligned, or none
    if (s.width % COUNT == 0 && together(from, s) && steady && aligned<COUNT>(source) && aligned<COUNT>(target))
        gather_chunks<CHUNKS>(source, target, item.column, apart, true, factor, from, s);
    else
#pragma unroll 1
        for (int n = 0; n < CHUNKS; ++n)
            gather_chunks<1>(source, target, item.column + n * apart, apart, false, factor, from, s);
}

// K and V, or the two parts of MLA's row, in one launch: blockIdx.y is the part.
KERNEL write(const ROW* k, const ROW* v, STORED* k_pages, STORED* v_pages, const void* slots, const float* k_scale,
             const float* v_scale, int tokens, Items k_items, Items v_items, Rows k_rows, Rows v_rows, Digits k_at,
             Digits v_at, Sizes k_sizes, Sizes v_sizes, Divide page_size, i64 capacity, int k_step, int v_step,
             int wide) {
    if (blockIdx.y == 0)
        write_rows(k, k_pages, slots, wide, k_scale, k_step, tokens, k_items, k_rows, k_at, k_sizes, page_size,
                   capacity);
    else
        write_rows(v, v_pages, slots, wide, v_scale, v_step, tokens, v_items, v_rows, v_at, v_sizes, page_size,
                   capacity);
}

KERNEL gather(const STORED* k_pages, const STORED* v_pages, ROW* k, ROW* v, const int* cu_seqlens_k,
              const int* block_table, const float* k_scale, const float* v_scale, int rows, Items k_items,
              Items v_items, Digits k_at, Digits v_at, Sizes k_sizes, Sizes v_sizes, Divide page_size, int num_pages,
              i64 table_step, int k_step, int v_step, int heads, int requests) {
    if (blockIdx.y == 0)
        gather_rows(k_pages, k, k_scale, k_step, cu_seqlens_k, block_table, table_step, rows, k_items, k_at, k_sizes,
                    heads, requests, page_size, num_pages);
    else
        gather_rows(v_pages, v, v_scale, v_step, cu_seqlens_k, block_table, table_step, rows, v_items, v_at, v_sizes,
                    heads, requests, page_size, num_pages);
}
