// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
)

// examineUnserved finds services without a socket.
func examineUnserved(s *state.State, r *kernel.Root) (out []Finding, err error) {
	if err := s.NoteUnserved(r); err != nil {
		return nil, err
	}
	for _, b := range s.Bound {
		for _, u := range b.Unserved {
			out = append(out, Finding{u.Service, u.Text(b.Netns), u.Remedy()})
		}
	}
	return out, nil
}
