// SPDX-License-Identifier: Apache-2.0

package slots

import "github.com/weir-project/weir/internal/netns"

// ErrNetnsGone says that no process and no name leads to a network namespace.
var ErrNetnsGone = netns.ErrGone

// OpenNetns opens the namespace that ref led to.
func OpenNetns(ref string, id netns.ID) (*netns.Handle, error) { return netns.Find(ref, id) }
