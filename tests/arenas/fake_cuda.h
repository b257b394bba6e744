/* The functions of fake_cuda.c for a check. */
#ifndef MEMFIT_FAKE_CUDA_H
#define MEMFIT_FAKE_CUDA_H

#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default")))
#define BASE ((uint64_t)1 << 40)

enum { PAGE = 1 << 14, TOTAL = 1 << 22, RANGE = TOTAL / 8 * 9 + PAGE, RANGES = 48, STREAMS = 4 };

extern int is_alone; /* whether only one thread runs, which makes the rules about order strict */

void must(int holds, const char *what);
long work(int stream);    /* issue a piece of work; return its number */
void advance(int stream); /* complete one more piece */
int is_done(int stream, long number);
int is_usable(const void *pointer, int64_t size);
int device_pages(void);
void capture(int stream); /* -1: end the capture */

#endif
