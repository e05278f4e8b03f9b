// SPDX-License-Identifier: Apache-2.0

package state

import "github.com/weir-project/weir/internal/pidfd"

// PIDs lists the processes that have a socket open, ascending.
func PIDs(inode uint32) []int {
	if inode == 0 {
		return nil
	}
	return pidfd.Holders(inode)[inode]
}
