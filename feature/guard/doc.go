// SPDX-License-Identifier: Apache-2.0

// Package guard limits UDP floods without rules. It detects sources far above the others' rate,
// gives clients priority by their past behaviour, and bounds the accepted rate in all cases.
// README.md has the algorithm, its guarantees and its limits. The state is in bpf/guard.h, the
// decision in bpf/admit.h.
//
// A guard is attached to one socket of an application (clients/go/guard), to the sockets of a
// service, or to interfaces (the guard section of a service's configuration). All of them use the
// same algorithm.
package guard
