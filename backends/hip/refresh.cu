// What a graph's step changes in persistent metadata, on the device. Launch: refresh.py.
#include "shim.h"

// Tokens that count, of 1 to `most`.
DEVICE int taken(const void* accepted, int row, int most, int wide) {
    const i64 given = wide ? ((const i64*)accepted)[row] : ((const int*)accepted)[row];
    return given < 1 ? 1 : given > most ? most : (int)given;
}

// Entries of a block table that changed; an index outside of the cells is none.
KERNEL refresh(const i64* index, const int* pages, int* cells, int entries, i64 size) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= entries) return;
    const i64 at = index[i];
    const int page = pages[i];
    if (at >= 0 && at < size) cells[at] = page;
}

// One more token for each request that has keys and room; the others get no slot, and keep what they have.
KERNEL advance(int* seq_lens, const int* block_table, i64* slot_mapping, i64* positions, int requests,
               int max_seq_len, Divide page_size, i64 table_step) {
    const int request = blockIdx.x * blockDim.x + threadIdx.x;
    if (request >= requests) return;
    const int position = seq_lens[request];  // of the new token
    i64 slot = -1;
    if (position > 0 && position < max_seq_len) {
        const int nth = page_size.of(position);
        const i64 page = block_table[request * table_step + nth];
        slot = page * page_size.divisor + (position - nth * page_size.divisor);
        seq_lens[request] = position + 1;
        if (positions) positions[request] = position;
    }
    slot_mapping[request] = slot;
}

// What an engine's tensors hold, into persistent ones: a thread for each cell, which is one of the other lists too.
KERNEL collect(int* cells, const void* table, const int* rows, const int* first, const void* accepted, int* kept,
               const int* lens, int* lens_to, const i64* slots, i64* slots_to, const u8* flags, u8* flags_to,
               i64 cells_step, i64 table_step, Divide columns, int count, int width, int pad, int steps, int most,
               int num_lens, int num_slots, int num_flags, int wide_table, int wide_accepted) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        const int row = columns.of(i), column = i - row * columns.divisor, from = rows ? rows[row] : row;
        i64 at = column + (first ? first[row] : 0);
        if (row < steps) at += taken(accepted, row, most, wide_accepted) - 1;
        int page = pad;
        if (from >= 0 && at >= 0 && at < width) {
            at += from * table_step;
            page = wide_table ? (int)((const i64*)table)[at] : ((const int*)table)[at];
        }
        cells[row * cells_step + column] = page;
    }
    if (kept && i < steps) kept[i] = taken(accepted, i, most, wide_accepted);
    if (i < num_lens) lens_to[i] = lens[i];
    if (i < num_slots) slots_to[i] = slots[i];
    if (i < num_flags) flags_to[i] = flags[i];
}
