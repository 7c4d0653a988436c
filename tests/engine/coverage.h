/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Counts of what runs, for `make coverage`: included by the compiler before all else.
 *
 * libgcov writes its counts at exit(), and most children of tests end by _exit(). So a program's
 * own _exit() writes them first, and who ends Python's children (tests/conftest.py) asks each
 * library to.
 */
#ifndef COVERAGE_H
#define COVERAGE_H

void __gcov_dump(void);
void __real__exit(int status) __attribute__((noreturn));
void __wrap__exit(int status) __attribute__((noreturn));
void coverage_write(void);

__attribute__((weak, visibility("default"))) void coverage_write(void)
{
	__gcov_dump();
}

__attribute__((weak)) void __wrap__exit(int status)
{
	__gcov_dump();
	__real__exit(status);
}

#endif
