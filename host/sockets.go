// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/service"
)

// SocketFlags are the flags of the features' own sockets, by feature.
func SocketFlags() map[string]feature.SocketFlag {
	out := map[string]feature.SocketFlag{}
	for _, f := range features {
		if x, ok := f.Value.(feature.SocketServer); ok {
			out[f.Name] = x.SocketFlag()
		}
	}
	return out
}

// sockets prepares the features' own sockets, by feature.
func (h *Host) sockets(o ServeOptions) map[string]feature.Socket {
	out := map[string]feature.Socket{}
	for _, f := range features {
		if x, ok := f.Value.(feature.SocketServer); ok && o.Sockets[f.Name] != "" {
			out[f.Name] = x.Socket(h.Root, o.Log, h.members)
		}
	}
	return out
}

// members implements feature.Members.
func (h *Host) members(name string) ([]service.Member, error) {
	for _, f := range features {
		if x, ok := f.Value.(feature.MemberLister); ok {
			return x.Members(h.Root, name)
		}
	}
	return nil, errors.ErrUnsupported
}

// mover moves the sessions that this weir serve keeps; nil if it keeps none.
func (o ServeOptions) mover() feature.SessionMover {
	for _, f := range features {
		if p, ok := f.Value.(feature.MoverProvider); ok && o.Sockets[f.Name] != "" {
			return p.SessionMover(o.Sockets[f.Name])
		}
	}
	return nil
}
