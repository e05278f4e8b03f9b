// SPDX-License-Identifier: Apache-2.0

// Package quarantine blocks single flows at a backend's devices while their sessions move. No packet reaches a
// blocked session's socket, and the kernel sends no RST for a session before its restore. The programs and maps are
// pinned: a quarantine outlives the agent.
//
// Lock order of a Quarantine: closing, changing.
package quarantine
