// SPDX-License-Identifier: Apache-2.0

package state

import "github.com/weir-project/weir/internal/pidfd"

// PIDs returns the processes with an open descriptor of a socket, ascending.
func PIDs(inode uint32) []int {
	if inode == 0 {
		return nil
	}
	return pidfd.Holders(inode)[inode]
}
