// The ordinary allocator for CUDA: heaps over address ranges whose pages are mapped when they are first used.
//
//   addresses   | live |  free  |live| free | live |                free                     |     blocks.c
//   pages       |######|######|......|######|######|......|......|......|......|......|......|     pages.c
//                mapped        spare, or not there
//
// Sources of what is used of CUDA: cuda.h and driver_types.h of CUDA 12.0 and 13.0, where they are the same.
#pragma once

#include "placing.h"

// ---- driver.c: NVIDIA's functions, of the libraries that PyTorch has loaded

typedef int status;
enum { SUCCESS = 0 };

typedef struct {
  int type, requested_handle_types;
  int location_type, location;
  void *win32;
  unsigned char flags[8];
} allocation_properties; // CUmemAllocationProp_v1

typedef struct {
  int location_type, location;
  int flags;
} access; // CUmemAccessDesc_v1

// Fields are named as the functions are, without cu or cuda.
typedef struct {
  status (*GetDevice)(int *);
  status (*SetDevice)(int);
  status (*GetLastError)(void);
  status (*DeviceSynchronize)(void);
  status (*MemGetInfo)(size_t *, size_t *);
  status (*StreamIsCapturing)(void *, int *);
  status (*ThreadExchangeStreamCaptureMode)(int *);
  status (*EventCreateWithFlags)(void **, unsigned);
  status (*EventRecord)(void *, void *);
  status (*EventQuery)(void *);
  status (*MemGetAllocationGranularity)(size_t *, const allocation_properties *, int);
  status (*MemAddressReserve)(uint64_t *, size_t, size_t, uint64_t, unsigned long long);
  status (*MemAddressFree)(uint64_t, size_t);
  status (*MemCreate)(uint64_t *, size_t, const allocation_properties *, unsigned long long);
  status (*MemRelease)(uint64_t);
  status (*MemMap)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
  status (*MemSetAccess)(uint64_t, size_t, const access *, size_t);
  status (*MemUnmap)(uint64_t, size_t);
} cuda_functions;

// Return them, or NULL: there is no CUDA build of PyTorch in this process, or its driver is too old.
const cuda_functions *cuda_driver(void);

// ---- raise.c: PyTorch's own exceptions, out of C. No lock may be held: they do not return.

_Noreturn void raise_out_of_memory(const char *message);
_Noreturn void raise_error(const char *message);

// ---- pages.c: pages of device memory

enum { GPUS = 64 };

typedef struct {
  int device;
  int64_t page_bytes, total_bytes;
  uint64_t *spare; // pages that are nowhere mapped
  int64_t spare_count, spare_room;
  int64_t pages, most_pages; // that the driver counts as used, now and at most
  int64_t allowed_pages;
  int64_t idle; // bytes that were mapped for heaps and free after the last trim
} gpu;

typedef struct {
  uint64_t handle;
  int is_mapped;
} page;

typedef struct range {
  gpu *gpu;
  uint64_t base;
  int64_t bytes;
  page *pages;
  int64_t mapped; // of them
  struct range *next;
} range;

// The device must be the current one when it is first asked for; NULL if the driver does not know it.
gpu *gpu_of(int device);
gpu *gpu_known(int device);
// Give back what is spare to the driver.
void gpu_release(gpu *g);
// Wait until all that are in use have done what they were told.
void gpus_synchronize(void);
// Reserve more addresses than the GPU could have memory for; whether there are as many.
int range_open(range *r, gpu *g);
void range_close(range *r);
// Map what is not mapped yet of [from, to), from spare pages first; whether all of it is.
int range_map(range *r, int64_t from, int64_t to);
// Make spare the pages that lie wholly within [from, to). Whatever ran there must have ended.
void range_unmap(range *r, int64_t from, int64_t to);
int range_holds(const range *r, const void *pointer);

// ---- pairs.c: pairs of numbers in their order

typedef struct {
  int64_t first, second;
} pair;

typedef struct {
  pair pair;
  uint32_t left, right, priority;
} node;

typedef struct {
  node *nodes; // from 1 on
  int64_t count, room;
  uint32_t root, made, unused, seed;
} pairs;

// Make room for so many pairs in all; whether there is.
int pairs_reserve(pairs *p, int64_t count);
// Add one; there must be room, and none that is equal.
void pairs_add(pairs *p, pair added);
void pairs_remove(pairs *p, pair removed);
// Find the first that does not come before one; whether there is any.
int pairs_from(const pairs *p, pair least, pair *found);
// Find the last that comes before one; whether there is any.
int pairs_before(const pairs *p, pair end, pair *found);
void pairs_end(pairs *p);

// ---- blocks.c: what lives in an address range

typedef struct {
  int64_t bytes;
  pairs live, free;   // offset and size of each
  pairs free_by_size; // size and offset
} blocks;

int blocks_begin(blocks *b, int64_t bytes);
void blocks_end(blocks *b);
// Take a place for so many bytes; -1 if there is none.
int64_t blocks_take(blocks *b, int64_t size);
// Give a block back; its size, or 0 if none that lives begins there.
int64_t blocks_give(blocks *b, int64_t offset);
// Find the first free block at an offset or above it; -1 if there is none.
int64_t blocks_next_free(const blocks *b, int64_t offset, int64_t *size);

// ---- heap.c: blocks on pages

typedef struct {
  uint64_t high, low;
} pool_id; // c10::cuda::MempoolId_t; {0, 0}: of no captured graph

typedef struct {
  range range;
  blocks blocks;
  const void *stream;
  pool_id pool;
  int64_t live; // bytes
} heap;

// Return the heap that serves a stream, made if need be; NULL without memory for it.
heap *heap_for(gpu *g, const void *stream, pool_id pool);
heap *heap_of(const void *pointer);
// Whatever order of heaps; NULL after the last.
heap *heap_at(int64_t i);
void *heap_take(heap *h, int64_t size);
int heap_give(heap *h, const void *pointer);
// Make spare the pages that nothing lives on. What ran there must have ended.
void heap_trim(heap *h);
// Forget a heap that nothing lives in; with its addresses.
void heap_end(heap *h);

// ---- captures.c: captured graphs

int is_pool(pool_id id);
// Begin a capture; NULL, or what is wrong.
const char *capture_begin(int device, pool_id id);
void capture_end(int device, pool_id id);
// One graph less uses the pool: begins and releases are as many.
void capture_release(int device, pool_id id);
int64_t captures_open(void);
int capture_uses(int device, pool_id id);
// Say which pool a stream is being captured for; none if it is not.
pool_id capture_pool(int device, void *stream);
// While something is captured, say what else this thread may do; what it was before.
enum { RELAXED = 2 }; // cudaStreamCaptureModeRelaxed
int capture_relax(int mode);

// ---- uses.c: memory that other streams use

// Note that a stream uses it.
int uses_add(const void *pointer, const void *stream);
// If other streams use it, keep it until they are done; so, too, if its own is not the next to use it. Whether it is
// kept; -1: for good, there is no memory to note it.
int uses_keep(const void *pointer, int64_t size, int device, const void *stream, int is_next);
// Record events for what is kept. Like the next one not during a capture.
void uses_record(void);
// Return one that is to be freed at last, of the oldest so many, or NULL.
const void *uses_done(int64_t among, int64_t *size, const void **stream);
int64_t uses_kept(void);

// ---- figures.c: what is used of a GPU

// Bytes.
typedef struct {
  int64_t pages, most_pages;      // that the driver counts as used, now and at most
  int64_t arena, heaps, spare;    // of the pages now
  int64_t in_heaps;               // that live there
  int64_t live, most_live;        // of all GPUs, as they were asked for
} cuda_figures;

// Count all but what lives.
void figures_count(int device, const range *arena, cuda_figures *out);
// Tell why so many bytes are not to be had.
void shortage_tell(char *out, size_t room, int64_t size, int device, const range *arena);
