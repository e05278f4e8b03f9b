// SPDX-License-Identifier: Apache-2.0

// Package slots reads who has a slot: the state of its row in an engine's maps,
// its process, and the predecessor that still drains beside it. It changes nothing.
package slots
