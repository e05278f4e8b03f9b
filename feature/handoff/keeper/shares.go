// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Shares divide the keeper's memory and descriptors, so no service or user can take all of them. A share is a
// multiple of the free amount. It shrinks as others arrive, so newcomers find some room. Sessions are charged to
// their owner's user, or to the last owner's while they wait.
const (
	// One user's sessions of one service may use 3 times the free amount: 3/4 of all for one user, 3/7 each for two.
	shareOne = 3
	// All sessions of one user, and all of one service, may use 31 times the free amount. Users with many services,
	// and services with many users, leave 1/32.
	shareAll = 31
)

// shareholder identifies sessions with a common share: of one user in one service, of a service, or of a user.
type shareholder struct {
	service *service // nil: all services
	user    int64    // -1: all users
}

// holding is the amount used by a shareholder.
type holding struct {
	bytes   int64 // of state, including reserved slots
	sockets int64
}

// share is a shareholder and its multiple of the free amount.
type share struct {
	shareholder
	times int64
}

// shares returns the shares charged for a user's session. Root and the keeper's own user have no share over all
// services, because they run the services of many users.
func shares(v *service, user uint32) []share {
	out := []share{{shareholder{v, int64(user)}, shareOne}, {shareholder{v, -1}, shareAll}}
	if user != 0 && int(user) != os.Geteuid() {
		out = append(out, share{shareholder{nil, int64(user)}, shareAll})
	}
	return out
}

// charge adds to the holdings of a session's shareholders. Amounts may be negative.
func (k *Keeper) charge(s *session, bytes, sockets int64) {
	k.state += bytes
	for _, h := range shares(s.service, s.user) {
		has := k.holdings[h.shareholder]
		has.bytes, has.sockets = has.bytes+bytes, has.sockets+sockets
		if has == (holding{}) {
			delete(k.holdings, h.shareholder)
		} else {
			k.holdings[h.shareholder] = has
		}
	}
}

// belongs charges a kept session to another user.
func (k *Keeper) belongs(s *session, user uint32) {
	if s.user == user {
		return
	}
	k.charge(s, -s.weight(), -1)
	s.user = user
	k.charge(s, s.weight(), 1)
}

// fits returns an error if a new state of size bytes has no room. A state that does not grow always fits: other
// sessions must not block commits. A shareholder's first state may use all of the rest.
func (k *Keeper) fits(m *member, s *session, size int64) error {
	more := size - s.weight()
	if more <= 0 || wire.Elsewhere(m.name) {
		return nil
	}
	free := k.MaxTotal - k.state - more
	if free < 0 {
		s.service.counts.OverLimit++
		return wire.Errorf(wire.Limit, "all states would take %d bytes; this keeper keeps at most %d: raise handoff.keeper.max_total, or --max-total", k.MaxTotal-free, k.MaxTotal)
	}
	for _, h := range shares(s.service, s.user) {
		if has := k.holdings[h.shareholder].bytes; has > 0 && has+more > h.times*free {
			s.service.counts.OverLimit++
			return wire.Errorf(wire.Limit, "%s would have %d bytes of state, more than its share of the keeper's %d: raise handoff.keeper.max_total, or --max-total", h.shareholder, has+more, k.MaxTotal)
		}
	}
	return nil
}

// admits returns an error if a member's new socket, received as fd, has no room.
func (k *Keeper) admits(m *member, fd int) error {
	if wire.Elsewhere(m.name) { // a session from another server exists already, and would end
		return nil
	}
	v, user := m.service, m.process.UID
	if n := k.holdings[shareholder{v, int64(user)}].sockets; n >= int64(k.MaxSessions) {
		v.counts.OverLimit++
		return wire.Errorf(wire.Limit, "service %s has %d sessions of user %d, the keeper's limit: raise handoff.keeper.max_sessions, or --max-sessions", v.name, n, user)
	}
	if full(fd) {
		v.counts.OverLimit++
		return wire.ErrNoDescriptors()
	}
	all := maxDescriptors()
	free := all - int64(len(k.sessions)) - 1
	for _, h := range shares(v, user) {
		if has := k.holdings[h.shareholder].sockets; has > 0 && has+1 > h.times*free {
			v.counts.OverLimit++
			return wire.Errorf(wire.Limit, "%s has %d sockets, its share of the keeper's %d descriptors: raise RLIMIT_NOFILE (LimitNOFILE= of a unit)", h.shareholder, has, all)
		}
	}
	return nil
}

// reserve is the number of descriptors not used for sockets, if the keeper may have more than eight times as many.
// They are for connections, and for large states in flight.
const reserve = 64

// maxDescriptors returns the number of descriptors usable for sockets.
func maxDescriptors() int64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return 1 << 62 / (shareAll + 1)
	}
	return int64(min(r.Cur-min(reserve, r.Cur/8), 1<<32))
}

// full reports whether a just received descriptor is one of the last: the kernel assigns the lowest free one.
func full(fd int) bool { return int64(fd) >= maxDescriptors() }

// String names a shareholder in errors.
func (h shareholder) String() string {
	switch {
	case h.service == nil:
		return fmt.Sprintf("user %d", h.user)
	case h.user < 0:
		return "service " + h.service.name
	}
	return fmt.Sprintf("service %s of user %d", h.service.name, h.user)
}
