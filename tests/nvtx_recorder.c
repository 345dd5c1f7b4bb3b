/* Writes what NVTX is told as lines to a file descriptor: the tool that tests attach instead of Nsight.
 *
 * NVTX loads the library that NVTX_INJECTION64_PATH names when it is first used, calls InitializeInjectionNvtx2, and
 * from then on the functions that were put into its table. The declarations are those of NVTX 3's nvtxTypes.h and
 * nvToolsExt.h, as far as they are needed. A line is `domain NAME`, `string ID NAME`, `category ID NAME`,
 * `push DOMAIN STRING CATEGORY PAYLOAD` or `pop DOMAIN`; NVTX_RECORDER_FILE names the file.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { EXPORT_TABLE_CALLBACKS = 1, MODULE_CORE2 = 5 };
enum { RANGE_PUSH_EX = 4, RANGE_POP = 5, NAME_CATEGORY_A = 8, REGISTER_STRING_A = 10, CREATE_A = 12, INITIALIZE = 15 };
enum { PAYLOAD_UNSIGNED_INT64 = 1, PAYLOAD_INT64 = 2, MESSAGE_REGISTERED = 3 };

typedef void (*function)(void);
typedef function **function_table;

struct export_table {
    size_t struct_size;
    int (*get_module_function_table)(int module, function_table *table, unsigned int *size);
};

struct event_attributes {
    uint16_t version;
    uint16_t size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type;
    int32_t reserved;
    union {
        int64_t as_int64;
        double as_double;
    } payload;
    int32_t message_type;
    const void *message;
};

static FILE *out;
static intptr_t num_domains, num_strings;

static void *create_domain(const char *name)
{
    num_domains++;
    fprintf(out, "domain %ld %s\n", (long)num_domains, name);
    return (void *)num_domains;
}

static void *register_string(void *domain, const char *text)
{
    (void)domain;
    num_strings++;
    fprintf(out, "string %ld %s\n", (long)num_strings, text);
    return (void *)num_strings;
}

static void name_category(void *domain, uint32_t category, const char *name)
{
    (void)domain;
    fprintf(out, "category %u %s\n", category, name);
}

static int push(void *domain, const struct event_attributes *event)
{
    long text = event->message_type == MESSAGE_REGISTERED ? (long)(intptr_t)event->message : -1;
    int is_integer = event->payload_type == PAYLOAD_INT64 || event->payload_type == PAYLOAD_UNSIGNED_INT64;
    long payload = is_integer ? (long)event->payload.as_int64 : -1;
    fprintf(out, "push %ld %ld %u %ld\n", (long)(intptr_t)domain, text, event->category, payload);
    return 0;
}

static int pop(void *domain)
{
    fprintf(out, "pop %ld\n", (long)(intptr_t)domain);
    return 0;
}

static void initialize(const void *reserved)
{
    (void)reserved;
}

int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t id))
{
    const struct export_table *tables = get_export_table(EXPORT_TABLE_CALLBACKS);
    const char *path = getenv("NVTX_RECORDER_FILE");
    function_table table = NULL;
    unsigned int size = 0;

    if (!tables || !path || !tables->get_module_function_table(MODULE_CORE2, &table, &size) || size <= INITIALIZE)
        return 0;
    out = fopen(path, "a");
    if (!out)
        return 0;
    setvbuf(out, NULL, _IOLBF, 0);
    *table[CREATE_A] = (function)create_domain;
    *table[REGISTER_STRING_A] = (function)register_string;
    *table[NAME_CATEGORY_A] = (function)name_category;
    *table[RANGE_PUSH_EX] = (function)push;
    *table[RANGE_POP] = (function)pop;
    *table[INITIALIZE] = (function)initialize;
    return 1;
}
