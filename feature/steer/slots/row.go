// SPDX-License-Identifier: Apache-2.0

package slots

import "github.com/weir-project/weir/feature/steer/spec"

// RowState is a row's state: enum steer_state.
type RowState uint32

const (
	Empty RowState = iota
	Admitted
	Exited
	Withdrawn
	Changing
)

// OwnEntries maps each endpoint to the socket entry of the same index.
var OwnEntries = func() (at [spec.MaxEndpoints]uint8) {
	for i := range at {
		at[i] = uint8(i)
	}
	return at
}()
