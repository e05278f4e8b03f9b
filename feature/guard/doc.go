// SPDX-License-Identifier: Apache-2.0

// Package guard limits floods of UDP without a rule: it finds out who sends far more than others, gives clients
// priority by what they have earned, and bounds what is accepted whatever comes. README.md has the algorithm, its
// guarantees and where it fails; bpf/guard.h the state; bpf/admit.h the decision.
//
// A guard is attached to one socket of an application (Attach), to the members of a service or to interfaces (the
// guard section of a service's configuration). All of them decide alike.
package guard
