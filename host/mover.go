// SPDX-License-Identifier: Apache-2.0

package host

import "github.com/weir-project/weir/feature"

// Mover returns a mover of the sessions of the keeper at socket; "" is the default socket. nil: no feature moves
// sessions.
func Mover(socket string) feature.SessionMover {
	for _, f := range features {
		if p, ok := f.Value.(feature.MoverProvider); ok {
			return p.SessionMover(socket)
		}
	}
	return nil
}
