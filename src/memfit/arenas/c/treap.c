/* Pairs of numbers in their order: a treap.
 *
 * Source: Seidel and Aragon, Randomized Search Trees, Algorithmica 16, 1996; Marsaglia, Xorshift RNGs,
 * 2003. */

#include <stdlib.h>

#include "cuda_heaps.h"

static int is_before(pair a, pair b)
{
    return a.first < b.first || (a.first == b.first && a.second < b.second);
}

/* Cut a tree in two: the pairs before one, and the rest. */
static void cut(treap *t, uint32_t at, pair middle, uint32_t *before, uint32_t *rest)
{
    if (!at) {
        *before = *rest = 0;
        return;
    }
    node *n = t->nodes.items + at;
    if (is_before(n->pair, middle)) {
        *before = at;
        cut(t, n->right, middle, &n->right, rest);
    } else {
        *rest = at;
        cut(t, n->left, middle, before, &n->left);
    }
}

/* Join two trees; every pair of one is before every pair of the other. */
static uint32_t join(treap *t, uint32_t before, uint32_t after)
{
    if (!before || !after)
        return before ? before : after;
    node *b = t->nodes.items + before, *a = t->nodes.items + after;
    if (b->priority > a->priority) {
        b->right = join(t, b->right, after);
        return before;
    }
    a->left = join(t, before, a->left);
    return after;
}

int treap_reserve(treap *t, int64_t count)
{
    if (count >= UINT32_MAX)
        return 0;
    return array_reserve(&t->nodes, (size_t)count + 1); /* node 0 is never used */
}

void treap_add(treap *t, pair added)
{
    uint32_t made = t->unused, before, rest;
    if (made)
        t->unused = t->nodes.items[made].left;
    else
        made = ++t->made;
    t->seed = t->seed ? t->seed : 0x9E3779B9;
    t->seed ^= t->seed << 13;
    t->seed ^= t->seed >> 17;
    t->seed ^= t->seed << 5;
    t->nodes.items[made] = (node){.pair = added, .priority = t->seed};
    cut(t, t->root, added, &before, &rest);
    t->root = join(t, join(t, before, made), rest);
    t->count++;
}

void treap_remove(treap *t, pair removed)
{
    uint32_t *at = &t->root;
    while (*at &&
           (is_before(t->nodes.items[*at].pair, removed) || is_before(removed, t->nodes.items[*at].pair)))
        at = is_before(t->nodes.items[*at].pair, removed) ? &t->nodes.items[*at].right
                                                          : &t->nodes.items[*at].left;
    uint32_t gone = *at;
    if (!gone)
        return;
    *at = join(t, t->nodes.items[gone].left, t->nodes.items[gone].right);
    t->nodes.items[gone].left = t->unused;
    t->unused = gone;
    t->count--;
}

int treap_first_from(const treap *t, pair least, pair *found)
{
    int is_found = 0;
    for (uint32_t at = t->root; at;) {
        const node *n = t->nodes.items + at;
        int is_too_early = is_before(n->pair, least);
        if (!is_too_early)
            *found = n->pair;
        is_found |= !is_too_early;
        at = is_too_early ? n->right : n->left;
    }
    return is_found;
}

int treap_last_before(const treap *t, pair end, pair *found)
{
    int is_found = 0;
    for (uint32_t at = t->root; at;) {
        const node *n = t->nodes.items + at;
        int is_early = is_before(n->pair, end);
        if (is_early)
            *found = n->pair;
        is_found |= is_early;
        at = is_early ? n->right : n->left;
    }
    return is_found;
}

void treap_clear(treap *t)
{
    free(t->nodes.items);
    *t = (treap){0};
}
