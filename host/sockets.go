// SPDX-License-Identifier: Apache-2.0

package host

import (
	"errors"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/service"
)

// SocketFlags returns the flags of the features' own sockets, by feature.
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

// runner returns the process of a feature, or nil if it has none.
func (o ServeOptions) runner(f feature.Declared) feature.Runner {
	mover, keeper := o.keeper()
	if u, ok := f.Value.(feature.MoverUser); ok && mover != nil {
		return u.WithMover(mover)
	}
	if u, ok := f.Value.(feature.KeeperUser); ok {
		return u.WithKeeper(keeper)
	}
	r, _ := f.Value.(feature.Runner)
	return r
}

// keeper returns the session keeper's socket. mover moves the sessions of the keeper in this weir serve; nil: it runs
// none.
func (o ServeOptions) keeper() (mover feature.SessionMover, socket string) {
	for _, f := range features {
		if p, ok := f.Value.(feature.MoverProvider); ok && o.Sockets[f.Name] != "" {
			return p.SessionMover(o.Sockets[f.Name]), o.Sockets[f.Name]
		}
	}
	return nil, o.Keeper
}

// expect passes the file that weir serve will apply to the sockets.
func expect(c *Config, sockets map[string]feature.Socket) {
	for _, s := range sockets {
		if x, ok := s.(feature.Expectant); ok {
			x.Expect(c.Document())
		}
	}
}
