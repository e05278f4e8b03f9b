// SPDX-License-Identifier: Apache-2.0

// Package quarantine blocks single flows at a backend's devices while their sessions move: nothing reaches a session's socket,
// and the kernel resets no session that is not restored yet. Its programs and maps are pinned: a quarantine outlives the agent.
//
// Locks of a Quarantine, in this order: closing, changing.
package quarantine
