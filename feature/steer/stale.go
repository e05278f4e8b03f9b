// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/internal/netns"
)

// openNetns opens the service's namespace.
func (s *ServiceState) openNetns() (*netns.Handle, error) {
	return slots.OpenNetns(s.pub.Netns, netns.ID{Inode: s.Inode, Cookie: s.pub.Cookie})
}
