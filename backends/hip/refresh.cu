// What a graph's step changes in persistent metadata, on the device. Launch: refresh.py.
#include "shim.h"

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
