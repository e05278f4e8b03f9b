// SPDX-License-Identifier: Apache-2.0

package users

import (
	"os/user"
	"strconv"
)

// GroupName returns the name of a group, or its number.
func GroupName(gid int) string {
	number := strconv.Itoa(gid)
	if g, err := user.LookupGroupId(number); err == nil {
		return g.Name
	}
	return number
}
