// Arrays that grow.

#include <stdlib.h>

#include "placing.h"

int grow(void **elements, int64_t count, int64_t *room, size_t element_size) {
  if (count < *room) return 1;
  int64_t more = *room ? 2 * *room : 256;
  void *moved = realloc(*elements, (size_t)more * element_size);
  if (!moved) return 0;
  *elements = moved;
  *room = more;
  return 1;
}
