/* CPU tensors: c10's allocator calls posix_memalign and free of the C library through slots of libc10.so.
 *
 * The slots are in the library's global offset table; they are redirected here, and restored. Source:
 * System V ABI, AMD64 supplement, chapter 5; alloc_cpu and free_cpu in c10/core/impl/alloc_cpu.cpp,
 * PyTorch 2.14.1. */

#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"

enum { SLOTS = 8, ALIGNMENT = 64 };
static const int64_t ADDRESSES = (int64_t)1 << 42; /* reserved, not used, so that the arena grows in place */

static arena cpu = ARENA_INITIALIZER;

static struct {
    void **slot;
    void *before;
} patched[SLOTS];
static int patched_count;

/* A step belongs to one thread: allocations of its helper threads come in no order. */
API uintptr_t cpu_lane(void) { return (uintptr_t)pthread_self(); }

static int take(void **out, size_t alignment, size_t size)
{
    void *place = alignment <= ALIGNMENT ? arena_allocate(&cpu, (int64_t)size, cpu_lane()) : NULL;
    if (place) {
        *out = place;
        return 0;
    }
    int status = posix_memalign(out, alignment, size);
    if (!status)
        arena_record(&cpu, *out, (int64_t)size, cpu_lane());
    return status;
}

static void leave(void *pointer)
{
    if (pointer && !arena_free(&cpu, pointer))
        free(pointer);
}

/* ---- the slots ------------------------------------------------------------------------------ */

static int point(void **slot, void *to)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *start = (void *)((uintptr_t)slot & ~(page - 1));
    if (mprotect(start, page, PROT_READ | PROT_WRITE))
        return 0; /* the page stays writable: other slots of it may be bound lazily */
    __atomic_store_n(slot, to, __ATOMIC_RELEASE);
    return 1;
}

static int patch(void **slot, void *to)
{
    if (patched_count == SLOTS)
        return 0;
    patched[patched_count].slot = slot;
    patched[patched_count].before = *slot;
    return point(slot, to) && ++patched_count;
}

typedef struct {
    const char *name;
    int takes, leaves;
} library;

static const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void patch_table(const struct dl_phdr_info *info, const ElfW(Rela) * table, size_t count,
                        const ElfW(Sym) * symbols, const char *strings, library *wanted)
{
    for (size_t i = 0; i < count; i++) {
        unsigned type = (unsigned)ELF64_R_TYPE(table[i].r_info);
        if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT)
            continue;
        const char *name = strings + symbols[ELF64_R_SYM(table[i].r_info)].st_name;
        void **slot = (void **)(info->dlpi_addr + table[i].r_offset);
        if (!strcmp(name, "posix_memalign"))
            wanted->takes += patch(slot, (void *)take);
        if (!strcmp(name, "free"))
            wanted->leaves += patch(slot, (void *)leave);
    }
}

static int patch_library(struct dl_phdr_info *info, size_t size, void *data)
{
    library *wanted = data;
    if (strcmp(file_name(info->dlpi_name), wanted->name))
        return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = (void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    if (!dynamic)
        return 1;
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    const ElfW(Rela) *calls = NULL, *data_slots = NULL;
    size_t call_bytes = 0, data_bytes = 0;
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        void *address = (void *)dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_SYMTAB)
            symbols = address;
        if (dynamic->d_tag == DT_STRTAB)
            strings = address;
        if (dynamic->d_tag == DT_JMPREL)
            calls = address;
        if (dynamic->d_tag == DT_PLTRELSZ)
            call_bytes = dynamic->d_un.d_val;
        if (dynamic->d_tag == DT_RELA)
            data_slots = address;
        if (dynamic->d_tag == DT_RELASZ)
            data_bytes = dynamic->d_un.d_val;
    }
    if (symbols && strings) {
        patch_table(info, calls, calls ? call_bytes / sizeof *calls : 0, symbols, strings, wanted);
        patch_table(info, data_slots, data_slots ? data_bytes / sizeof *data_slots : 0, symbols, strings,
                    wanted);
    }
    return 1;
}

/* ---- for Python ----------------------------------------------------------------------------- */

/* A forked child has a consistent copy of the arena, and no step. */
static void before_fork(void) { pthread_mutex_lock(&cpu.lock); }

static void after_fork(void) { pthread_mutex_unlock(&cpu.lock); }

static void in_child(void)
{
    pthread_mutex_init(&cpu.lock, NULL);
    cpu.mode = IDLE;
}

static int reserve_addresses(void)
{
    if (cpu.base)
        return 1;
    void *base = mmap(NULL, (size_t)ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || pthread_atfork(before_fork, after_fork, in_child))
        return 0;
    cpu.base = base;
    cpu.address_bytes = ADDRESSES;
    return 1;
}

API void cpu_detach(void);

/* Route the CPU allocations of a loaded library (libc10.so) through here until cpu_detach; NULL if the
 * library does not make them as expected. */
API arena *cpu_attach(const char *name)
{
    if (patched_count)
        return &cpu;
    library wanted = {name, 0, 0};
    if (reserve_addresses())
        dl_iterate_phdr(patch_library, &wanted);
    if (wanted.takes && wanted.leaves)
        return &cpu;
    cpu_detach();
    return NULL;
}

/* Restore the slots, unless the arena has live allocations: their frees must come here. */
API void cpu_detach(void)
{
    while (patched_count && !cpu.live.count) {
        patched_count--;
        point(patched[patched_count].slot, patched[patched_count].before);
    }
}

/* Make the arena at least as large; return whether it is. */
API int cpu_reserve(int64_t bytes)
{
    pthread_mutex_lock(&cpu.lock);
    int64_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    int is_there = whole <= ADDRESSES &&
                   (whole <= cpu.bytes || !mprotect(cpu.base, (size_t)whole, PROT_READ | PROT_WRITE));
    if (is_there && whole > cpu.bytes)
        cpu.bytes = whole;
    pthread_mutex_unlock(&cpu.lock);
    return is_there;
}

/* Release the arena's memory to the system if nothing is live; it returns on use. */
API void cpu_trim(void)
{
    pthread_mutex_lock(&cpu.lock);
    if (!cpu.live.count && cpu.bytes)
        madvise(cpu.base, (size_t)cpu.bytes, MADV_DONTNEED);
    pthread_mutex_unlock(&cpu.lock);
}
