// Rows into the pages of a cache and back, in every layout: an address is page, the token's offset in two digits, the
// head, and the column in two digits. ROW is the type of rows, STORED that of the cache. Launch: cache.py.
#include "shim_hip.h"

// In elements. Plain layouts have one digit of each; packed ones put `packed` columns or offsets last.
struct Digits { i64 page, offset, offset_low, head, column, column_low; };
struct Rows { i64 token, head; };
struct Sizes { int heads, width, packed_offset, packed_column; };

// Of the chunk of columns that starts at `column`; `together`: its columns are neighbours.
DEVICE i64 address(Digits at, Sizes s, i64 page, int offset, int head, int column, int count, bool* together) {
    i64 to = page * at.page + head * at.head;
    to += s.packed_offset > 1 ? offset / s.packed_offset * at.offset + offset % s.packed_offset * at.offset_low
                              : offset * at.offset;
    if (s.packed_column > 1) {
        *together = at.column_low == 1 && s.packed_column % count == 0;
        return to + column / s.packed_column * at.column + column % s.packed_column * at.column_low;
    }
    *together = at.column == 1;
    return to + column * at.column;
}

DEVICE i64 step(Digits at, Sizes s, int column, int i) {  // from a chunk's first column to its i-th
    if (s.packed_column == 1) return i * at.column;
    const int low = column % s.packed_column + i;
    return low / s.packed_column * at.column + (low % s.packed_column - column % s.packed_column) * at.column_low;
}

// A thread takes COUNT columns of one (token, head).
template <typename S, typename T, typename Slot>
DEVICE void write_rows(const S* rows, T* pages, const Slot* slots, const float* scale, int scale_step, Rows from,
                       Digits to, Sizes s, int tokens, i64 capacity, int page_size) {
    constexpr int COUNT = 16 / sizeof(S);
    const int chunks = (s.width + COUNT - 1) / COUNT;
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, row = item / chunks;
    const int column = item % chunks * COUNT, token = row / s.heads, head = row % s.heads;
    if (token >= tokens) return;
    const i64 slot = slots[token];
    if (slot < 0 || slot >= capacity) return;
    const S* source = rows + token * from.token + head * from.head + column;
    bool together;
    const i64 page = slot / page_size;
    T* target = pages + address(to, s, page, slot - page * page_size, head, column, COUNT, &together);
    const float divisor = sizeof(T) == 1 && scale ? scale[head * scale_step] : 1.0f;
    const int count = min(COUNT, s.width - column);
    const auto in = read<S, COUNT>(source, count == COUNT && aligned<COUNT>(source), count, next);
    Few<T, COUNT> out;
    out.clear();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) out.set(i, From<T>::value(to_float(in.get(i)) / divisor));
    write(target, out, count == COUNT && together && aligned<COUNT>(target), count,
          [&](int i) { return step(to, s, column, i); });
}

// COUNT columns of one (token, head), by binary search of the token's request.
template <typename T, typename S>
DEVICE void gather_rows(const T* pages, S* rows, const float* scale, int scale_step, const int* cu_seqlens_k,
                        const int* block_table, i64 table_step, Digits from, Sizes s, int requests, i64 num_rows,
                        int page_size) {
    constexpr int COUNT = 16 / sizeof(S);
    const int chunks = (s.width + COUNT - 1) / COUNT;
    const i64 item = (i64)blockIdx.x * blockDim.x + threadIdx.x, row = item / chunks;
    const int column = (int)(item - row * chunks) * COUNT;
    const i64 token = row / s.heads;
    const int head = row - token * s.heads;
    if (token >= num_rows) return;
    Few<S, COUNT> out;
    out.clear();
    const int count = min(COUNT, s.width - column);
    if (token < cu_seqlens_k[requests]) {  // else the host's lengths are bounds: 0 beyond the last row
        int request = 0;
        for (int beyond = requests; beyond - request > 1;) {
            const int middle = (request + beyond) / 2;
            if (cu_seqlens_k[middle] <= token) request = middle;
            else beyond = middle;
        }
        const int position = token - cu_seqlens_k[request], nth = position / page_size;
        const i64 page = block_table[request * table_step + nth];
        bool together;
        const T* source = pages + address(from, s, page, position - nth * page_size, head, column, COUNT, &together);
        const float factor = sizeof(T) == 1 && scale ? scale[head * scale_step] : 1.0f;
        const auto in = read<T, COUNT>(source, count == COUNT && together && aligned<COUNT>(source), count,
                                       [&](int i) { return step(from, s, column, i); });
#pragma unroll
        for (int i = 0; i < COUNT; ++i) out.set(i, From<S>::value(to_float(in.get(i)) * factor));
    }
    S* target = rows + row * s.width + column;
    write(target, out, count == COUNT && aligned<COUNT>(target), count, next);
}

// K and V, or the two parts of MLA's row, in one launch: blockIdx.y is the part.
KERNEL write(const ROW* k, const ROW* v, STORED* k_pages, STORED* v_pages, const i64* slots, const int* slots32,
             const float* k_scale, const float* v_scale, Rows k_rows, Rows v_rows, Digits k_at, Digits v_at,
             Sizes k_sizes, Sizes v_sizes, int k_step, int v_step, int tokens, int page_size, i64 capacity) {
    const bool second = blockIdx.y;
    const ROW* rows = second ? v : k;
    STORED* pages = second ? v_pages : k_pages;
    const float* scale = second ? v_scale : k_scale;
    const int step = second ? v_step : k_step;
    const Rows from = second ? v_rows : k_rows;
    const Digits to = second ? v_at : k_at;
    const Sizes sizes = second ? v_sizes : k_sizes;
    if (slots) write_rows(rows, pages, slots, scale, step, from, to, sizes, tokens, capacity, page_size);
    else write_rows(rows, pages, slots32, scale, step, from, to, sizes, tokens, capacity, page_size);
}

KERNEL gather(const STORED* k_pages, const STORED* v_pages, ROW* k, ROW* v, const int* cu_seqlens_k,
              const int* block_table, const float* k_scale, const float* v_scale, Digits k_at, Digits v_at,
              Sizes k_sizes, Sizes v_sizes, i64 table_step, i64 num_rows, int k_step, int v_step, int requests,
              int page_size) {
    const bool second = blockIdx.y;
    gather_rows(second ? v_pages : k_pages, second ? v : k, second ? v_scale : k_scale, second ? v_step : k_step,
                cu_seqlens_k, block_table, table_step, second ? v_at : k_at, second ? v_sizes : k_sizes, requests,
                num_rows, page_size);
}
