// SPDX-License-Identifier: Apache-2.0

// Package slots reads the state of slots: the row in an engine's maps, the member's process, and a draining
// predecessor. It changes nothing.
package slots
