// SPDX-License-Identifier: Apache-2.0

package slots

import "github.com/weir-project/weir/internal/netns"

// ErrNetnsGone means that no process and no name refers to the network namespace.
var ErrNetnsGone = netns.ErrGone

// OpenNetns opens the namespace of ref.
func OpenNetns(ref string, id netns.ID) (*netns.Handle, error) { return netns.Find(ref, id) }
