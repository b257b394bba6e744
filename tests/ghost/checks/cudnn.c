/* cuDNN: descriptors, the questions about an operation, and the log of workspaces. */
#include "checks.h"
#include "libraries/cudnn.h"

#include <math.h>

status cudnnCreateTensorDescriptor(void **), cudnnDestroyTensorDescriptor(void *);
status cudnnSetTensorNdDescriptor(void *, int, int, const int *, const int *);
status cudnnGetTensorNdDescriptor(const void *, int, int *, int *, int *, int *);
status cudnnCreateFilterDescriptor(void **), cudnnDestroyFilterDescriptor(void *);
status cudnnSetFilterNdDescriptor(void *, int, int, int, const int *);
status cudnnGetFilterNdDescriptor(const void *, int, int *, int *, int *, int *);
status cudnnBackendCreateDescriptor(int, void **), cudnnBackendDestroyDescriptor(void *);
status cudnnBackendSetAttribute(void *, int, int, int64_t, const void *);
status cudnnBackendGetAttribute(void *, int, int, int64_t, int64_t *, void *);
status cudnnBackendExecute(void *, void *, void *), cudnnBackendFinalize(void *);
status cudnnCreateRNNDescriptor(void **), cudnnDestroyRNNDescriptor(void *);
status cudnnSetRNNDescriptor_v8(void *, int, int, int, int, int, int, int, int, int32_t, int32_t, int32_t,
                                int32_t, void *, uint32_t);
status cudnnGetRNNWeightSpaceSize(void *, void *, size_t *);
status cudnnGetRNNWeightParams(void *, void *, int32_t, size_t, const void *, int32_t, void *, void **,
                               void *, void **);

/* Numbers of cudnn_graph.h that the checks use. */
enum {
    TENSOR = 17,
    ENGINE = 2,
    WEIGHT_GRADIENT = 11,
    GRAPH = 15,
    HEURISTICS = 4,
    CONFIG = 3,
    PLAN = 5,
    VARIANT_PACK = 16
};
enum {
    HANDLE = 0,
    DATA_TYPE = 1,
    INT64 = 3,
    FLOAT = 4,
    DOUBLE = 5,
    POINTER = 6,
    HEUR_MODE = 8,
    NUMERICAL_NOTE = 11,
    DESCRIPTOR = 15,
    BEHAVIOR_NOTE = 19
};

void descriptors(void)
{
    void *tensor, *filter;
    int sizes[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, got[12] = {0}, steps[12] = {0};
    int type, dimensions, format;
    cudnnCreateTensorDescriptor(&tensor);
    cudnnSetTensorNdDescriptor(tensor, 2, 4, sizes, sizes);
    cudnnGetTensorNdDescriptor(tensor, 2, &type, &dimensions, got, steps);
    CHECK(type == 2 && dimensions == 4 && got[1] == 2 && got[2] == 0);
    cudnnSetTensorNdDescriptor(tensor, 2, 12, sizes, sizes); /* more than there is room for */
    cudnnGetTensorNdDescriptor(tensor, 12, &type, &dimensions, got, steps);
    CHECK(dimensions == 8 && got[7] == 8 && got[8] == 0);
    cudnnSetTensorNdDescriptor(tensor, 2, -3, sizes, sizes);
    cudnnGetTensorNdDescriptor(tensor, 12, &type, &dimensions, got, steps);
    CHECK(dimensions == 0);
    cudnnDestroyTensorDescriptor(tensor);

    cudnnCreateFilterDescriptor(&filter);
    for (int channels_last = 0; channels_last < 2; channels_last++) {
        cudnnSetFilterNdDescriptor(filter, 0, channels_last, 4, (int[]){8, 4, 3, 5});
        cudnnGetFilterNdDescriptor(filter, 4, &type, &format, &dimensions, got);
        CHECK(format == channels_last && dimensions == 4 && got[0] == 8 && got[1] == 4 && got[3] == 5);
        const int64_t strides[2][4] = {{60, 15, 5, 1}, {60, 1, 20, 4}};
        CHECK(memcmp(((struct tensor *)filter)->strides, strides[channels_last], sizeof *strides) == 0);
    }
    cudnnDestroyFilterDescriptor(filter);
}

/* ---- Questions ------------------------------------------------------------------------------- */

static char last_question[8192];
static int questions;
static const struct ghost_configuration answers[2] = {
    {.workspace = 4096, .engine = 38, .numerical_notes = 1 << 0 | 1u << 31, .behavior_notes = 1 << 3}};

static int remember(const char *question, struct ghost_configuration *out, int room)
{
    snprintf(last_question, sizeof last_question, "%s", question);
    questions++;
    for (int i = 0; i < room && i < 2; i++)
        out[i] = answers[i];
    return 999; /* a count above the room is capped */
}

void question_bounds(void)
{
    const int64_t numbers[MOST_DIMENSIONS] = {INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN,
                                              INT64_MIN, INT64_MIN, INT64_MIN, INT64_MIN};
    struct ghost_configuration only = {.workspace = 1};
    CHECK(ghost_ask("{}", &only, 1) == 1 && only.workspace == 0); /* no answerer: the size is assumed */
    CHECK(ghost_gaps_reached(NULL, 0) > 1);
    ghost_set_answerer(remember);
    CHECK(ghost_ask("{}", &only, 1) == 1 && only.workspace == 4096);
    CHECK(ghost_ask("{}", NULL, 0) == 0);
    struct text question = begin_question("a");
    add_text(&question, "b", "c");
    add_number(&question, "d", -5);
    add_list(&question, "e", (int64_t[]){1, 2}, 2);
    CHECK(ask_workspace(&question) == 4096);
    CHECK(strcmp(last_question, "{\"kind\":\"a\",\"b\":\"c\",\"d\":-5,\"e\":[1,2]}") == 0);
    struct text longer = begin_question("a");
    for (int i = 0; i < 40; i++)
        add_list(&longer, "f", numbers, MOST_DIMENSIONS);
    CHECK(ask_workspace(&longer) == 4096 && strlen(last_question) == 11 + 40 * (7 + 20 * 8 + 7) + 1);
    struct text cut = begin_question("a");
    cut.cut = true;
    CHECK(ask_workspace(&cut) == 4096 && strcmp(last_question, "{\"kind\":\"unknown\"}") == 0);
}

static void *made(int type)
{
    void *descriptor;
    CHECK(cudnnBackendCreateDescriptor(type, &descriptor) == SUCCESS);
    return descriptor;
}

/* Heuristics over a graph of one operation on one tensor; the descriptors they were made from are
 * destroyed. */
static void *heuristics_over(void *tensor)
{
    const float alpha = 0.5f;
    const double beta = 1.5;
    void *operation = made(WEIGHT_GRADIENT), *graph = made(GRAPH), *heuristics = made(HEURISTICS);
    cudnnBackendSetAttribute(operation, 716, DESCRIPTOR, 1, &tensor);
    cudnnBackendSetAttribute(operation, 712, FLOAT, 1, &alpha);
    cudnnBackendSetAttribute(operation, 713, DOUBLE, 1, &beta);
    cudnnBackendSetAttribute(graph, 800, HANDLE, 1, &operation);
    cudnnBackendSetAttribute(graph, 801, DESCRIPTOR, 2, (void *[]){operation, tensor});
    cudnnBackendSetAttribute(heuristics, 201, DESCRIPTOR, 1, &graph);
    cudnnBackendSetAttribute(heuristics, 200, HEUR_MODE, 1, &(int){2});
    cudnnBackendDestroyDescriptor(tensor), cudnnBackendDestroyDescriptor(operation);
    cudnnBackendDestroyDescriptor(graph);
    return heuristics;
}

static void *tensor_of(int type, const void *values, int64_t count)
{
    void *tensor = made(TENSOR);
    cudnnBackendSetAttribute(tensor, 901, DATA_TYPE, 1, &(int){2});
    cudnnBackendSetAttribute(tensor, 902, type, count, values);
    return tensor;
}

void graph_questions(void)
{
    const int64_t sizes[3] = {1, -2, INT64_MAX};
    const double endless = INFINITY;
    void *nothing = NULL;
    configure(GIB);
    ghost_set_answerer(remember);
    void *heuristics = heuristics_over(tensor_of(INT64, sizes, 3));
    CHECK(questions == 0);
    CHECK(cudnnBackendFinalize(heuristics) == SUCCESS && cudnnBackendFinalize(heuristics) == SUCCESS);
    CHECK(questions == 1);
#define TENSOR_JSON "{\"type\":17,\"attributes\":[[901,1,[2]],[902,3,[1,-2,9223372036854775807]]]}"
    CHECK(strcmp(last_question,
                 "{\"kind\":\"plan\",\"descriptor\":{\"type\":4,\"attributes\":[[201,15,[{\"type\":15,"
                 "\"attributes\":[[801,15,[{\"type\":11,\"attributes\":[[716,15,[" TENSOR_JSON
                 "]],[712,4,[0.5]],[713,5,[1.5]]]}," TENSOR_JSON "]]]}]],[200,8,[2]]]}}") == 0);
    cudnnBackendDestroyDescriptor(heuristics);
    /* A value that JSON cannot express makes the question unknown. */
    heuristics = heuristics_over(tensor_of(DOUBLE, &endless, 1));
    cudnnBackendFinalize(heuristics);
    CHECK(strcmp(last_question, "{\"kind\":\"unknown\"}") == 0);
    CHECK(cudnnBackendSetAttribute(heuristics, 201, DESCRIPTOR, 1, &nothing) == DNN_BAD_PARAM);
    CHECK(cudnnBackendSetAttribute(heuristics, 201, DESCRIPTOR, -1, &nothing) == SUCCESS);
    cudnnBackendDestroyDescriptor(heuristics);
}

void graph_choices(void)
{
    const int64_t sizes[1] = {1};
    int64_t found = 0, size = -1, engine = -1;
    int notes[4] = {-1, -1, -1, -1};
    configure(GIB);
    ghost_set_answerer(remember);
    void *heuristics = heuristics_over(tensor_of(INT64, sizes, 1));
    void *configs[300], *first = made(ENGINE), *memory = allocated(4096);
    for (int i = 0; i < 300; i++)
        configs[i] = made(CONFIG);
    cudnnBackendFinalize(heuristics);
    cudnnBackendGetAttribute(heuristics, 202, DESCRIPTOR, 1, &found, configs);
    CHECK(found == 1);
    cudnnBackendGetAttribute(heuristics, 202, DESCRIPTOR, 300, &found, configs);
    CHECK(found == 256); /* the capacity */
    cudnnBackendDestroyDescriptor(heuristics);

    cudnnBackendGetAttribute(configs[0], 300, DESCRIPTOR, 1, &found, &first);
    cudnnBackendGetAttribute(first, 1301, INT64, 1, &found, &engine);
    CHECK(engine == 38);
    cudnnBackendGetAttribute(first, 1303, NUMERICAL_NOTE, 0, &found, NULL);
    CHECK(found == 2);
    cudnnBackendGetAttribute(first, 1303, NUMERICAL_NOTE, 1, &found, notes);
    CHECK(found == 1 && notes[0] == 0 && notes[1] == -1);
    cudnnBackendGetAttribute(first, 1303, NUMERICAL_NOTE, 4, &found, notes);
    CHECK(found == 2 && notes[1] == 31 && notes[2] == -1);
    cudnnBackendGetAttribute(first, 1305, BEHAVIOR_NOTE, 4, &found, notes);
    CHECK(found == 1 && notes[0] == 3);
    cudnnBackendGetAttribute(configs[0], 302, DESCRIPTOR, 1, &found, &first);
    CHECK(found == 0); /* no knobs */

    void *plan = made(PLAN), *frugal = made(PLAN), *pack = made(VARIANT_PACK);
    cudnnBackendSetAttribute(plan, 401, DESCRIPTOR, 1, &configs[0]);
    cudnnBackendSetAttribute(frugal, 401, DESCRIPTOR, 1, &configs[1]);
    cudnnBackendGetAttribute(plan, 402, INT64, 1, &found, &size);
    CHECK(size == 4096 && found == 1);
    cudnnBackendGetAttribute(frugal, 402, INT64, 1, &found, &size);
    CHECK(size == 0 && questions == 1);
    struct ghost_workspace_use uses[3];
    CHECK(ghost_workspace_uses(uses, 2) == 1 && uses[0].address == 0 && uses[0].size == 4096); /* reported */
    cudnnBackendSetAttribute(pack, 1003, POINTER, 1, &memory);
    cudnnBackendExecute(NULL, frugal, pack);
    CHECK(ghost_workspace_uses(uses, 3) == 2 && uses[1].address == 0 && uses[1].size == 0); /* ran without */
    ghost_set_label(7);
    cudnnBackendExecute(NULL, plan, pack);
    CHECK(ghost_workspace_uses(uses, 3) == 3);
    CHECK(uses[2].address == (uint64_t)memory && uses[2].size == 4096 && uses[2].label == 7);

    size_t before = ghost_gaps_reached(NULL, 0);
    void *by_hand = made(CONFIG);
    cudnnBackendFinalize(configs[0]);
    CHECK(ghost_gaps_reached(NULL, 0) == before);
    cudnnBackendFinalize(by_hand); /* an engine that heuristics did not choose */
    CHECK(ghost_gaps_reached(NULL, 0) > before);
    for (int i = 0; i < 300; i++)
        cudnnBackendDestroyDescriptor(configs[i]);
    cudnnBackendDestroyDescriptor(plan), cudnnBackendDestroyDescriptor(frugal);
    cudnnBackendDestroyDescriptor(pack), cudnnBackendDestroyDescriptor(first);
    cudnnBackendDestroyDescriptor(by_hand), cudaFree(memory);
}

void workspace_log(void)
{
    struct ghost_workspace_use spaces[4];
    ghost_workspace_used(NULL, 8), ghost_workspace_used(spaces, 0);
    CHECK(ghost_workspace_uses(NULL, 0) == 0);
    for (uint64_t i = 0; i < 1000; i++)
        for (int repetition = 0; repetition < 3; repetition++)
            ghost_workspace_used(spaces, 1 + i);
    CHECK(ghost_workspace_uses(spaces, 2) == 1000 && spaces[1].size == 2);
}

/* ---- Recurrent networks ---------------------------------------------------------------------- */

/* Every matrix and bias is inside the buffer, none overlaps another, and together they fill it. */
void recurrent_weights(void)
{
    enum { RELU_CELL = 0, LSTM = 2, GRU = 3 };
    const struct {
        int cell, bias, directions, skips, projection, layers;
    } nets[] = {{LSTM, 2, 1, 0, 0, 1}, {LSTM, 2, 2, 0, 0, 3},     {LSTM, 2, 2, 0, 3, 2},
                {LSTM, 0, 1, 0, 3, 2}, {GRU, 2, 2, 0, 0, 2},      {GRU, 1, 1, 0, 0, 2},
                {GRU, 3, 1, 1, 0, 2},  {RELU_CELL, 2, 1, 0, 0, 2}};
    void *rnn, *matrix, *bias, *addresses[2];
    cudnnCreateRNNDescriptor(&rnn), cudnnCreateTensorDescriptor(&matrix), cudnnCreateTensorDescriptor(&bias);
    for (size_t n = 0; n < sizeof nets / sizeof *nets; n++) {
        int gates = nets[n].cell == LSTM ? 4 : nets[n].cell == GRU ? 3 : 1;
        int hidden = 5, input = nets[n].skips ? 5 : 7;
        size_t size, filled = 0;
        CHECK(cudnnSetRNNDescriptor_v8(rnn, 0, nets[n].cell, nets[n].bias, nets[n].directions - 1,
                                       nets[n].skips, 0, 0, 0, input, hidden, nets[n].projection,
                                       nets[n].layers, NULL, 0) == SUCCESS);
        cudnnGetRNNWeightSpaceSize(NULL, rnn, &size);
        char *space = calloc(1, size);
        for (int layer = 0; layer < nets[n].layers * nets[n].directions; layer++)
            for (int linear = 0; linear < 2 * gates + (nets[n].cell == LSTM); linear++) {
                struct tensor *tensors[2] = {matrix, bias};
                CHECK(cudnnGetRNNWeightParams(NULL, rnn, layer, size, space, linear, matrix, &addresses[0],
                                              bias, &addresses[1]) == SUCCESS);
                for (int which = 0; which < 2; which++) {
                    int64_t *sizes = tensors[which]->sizes, bytes = 4 * sizes[0] * sizes[1] * sizes[2];
                    CHECK(!addresses[which] == (tensors[which]->dimensions == 0));
                    for (char *at = addresses[which]; at && at < (char *)addresses[which] + bytes; at++) {
                        CHECK(*at == 0);
                        *at = 1;
                        filled++;
                    }
                }
            }
        CHECK(filled == size);
        const struct {
            int layer, linear;
            size_t size;
        } refused[] = {{-1, 0, size}, {99, 0, size}, {0, 9, size}, {0, -1, size}, {0, 0, size - 1}};
        for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
            CHECK(cudnnGetRNNWeightParams(NULL, rnn, refused[i].layer, refused[i].size, space,
                                          refused[i].linear, NULL, NULL, NULL, NULL) == DNN_BAD_PARAM);
        free(space);
    }
    CHECK(cudnnSetRNNDescriptor_v8(rnn, 0, 4, 2, 0, 0, 0, 0, 0, 7, 5, 0, 1, NULL, 0) == DNN_BAD_PARAM);
    CHECK(cudnnSetRNNDescriptor_v8(rnn, 0, 2, 2, 0, 0, 0, 0, 0, 7, 5, 6, 1, NULL, 0) == DNN_BAD_PARAM);
    cudnnDestroyRNNDescriptor(rnn), cudnnDestroyTensorDescriptor(matrix), cudnnDestroyTensorDescriptor(bias);
}
