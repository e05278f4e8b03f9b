// SPDX-License-Identifier: Apache-2.0

// Package guard limits UDP floods without rules. It detects sources far above the others' rate,
// gives clients priority by their past behaviour, and bounds the accepted rate in all cases.
// README.md has the algorithm, its guarantees and its limits. The state is in bpf/guard.h, the
// decision in bpf/admit.h.
//
// A guard is attached to one socket of an application (clients/go/guard). The guard section of a
// service's configuration attaches one to the service's sockets or to interfaces. All of them use
// the same algorithm.
package guard
