// SPDX-License-Identifier: Apache-2.0

package dump

import (
	"errors"
	"fmt"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestWhole(t *testing.T) {
	calls := 0
	list := func() ([]int, error) {
		if calls++; calls < 5 {
			return []int{1}, fmt.Errorf("list: %w", netlink.ErrDumpInterrupted)
		}
		return []int{1, 2}, nil
	}
	if all, err := whole(list); err != nil || len(all) != 2 {
		t.Errorf("%v, %v: want the fifth listing", all, err)
	}
	always := func() ([]int, error) { return nil, netlink.ErrDumpInterrupted }
	if _, err := whole(always); !errors.Is(err, netlink.ErrDumpInterrupted) {
		t.Errorf("a listing that is always interrupted: %v", err)
	}
	calls = 0
	other := errors.New("no memory")
	if _, err := whole(func() ([]int, error) { calls++; return nil, other }); err != other || calls != 1 {
		t.Errorf("%v after %d calls: want the error of the first", err, calls)
	}
}
