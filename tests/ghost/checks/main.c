/* Runs the check named on the command line, or lists them all.
 *
 * test_runtime.py compiles these files with the runtime's own sources, under the address and
 * undefined-behaviour sanitizers, and runs each check in its own process.
 */
#include "checks.h"

#define LISTED(name) {#name, name},

int main(int count, char **arguments)
{
    const struct {
        const char *name;
        void (*run)(void);
    } checks[] = {EACH_CHECK(LISTED)};
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        if (count == 1)
            puts(checks[i].name);
        else if (strcmp(arguments[1], checks[i].name) == 0)
            return checks[i].run(), 0;
    }
    return count > 1;
}
