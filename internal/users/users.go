// SPDX-License-Identifier: Apache-2.0

// Package users finds the identity for a process.
package users

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// Identity is a user with the data to start a process.
type Identity struct {
	Credential syscall.Credential
	Env        []string // USER, LOGNAME and HOME
	limit      *uint64  // capabilities kept by root's programs; nil: all
}

// Find finds a user by name or number. A number needs no entry in the user database.
func Find(name string) (id Identity, err error) {
	u, err := user.Lookup(name)
	if n, nerr := strconv.ParseUint(name, 10, 32); err != nil && nerr == nil {
		number := strconv.FormatUint(n, 10)
		// A number without a name, or a system without names.
		if u, err = user.LookupId(number); err != nil || u.Uid != number {
			u, err = &user.User{Uid: number, Gid: number, Username: number, HomeDir: "/"}, nil
		}
	}
	if err != nil {
		return id, err
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return id, fmt.Errorf("user %s: %w", name, err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return id, fmt.Errorf("user %s: %w", name, err)
	}
	id.Credential = syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	groups, err := u.GroupIds()
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return id, fmt.Errorf("groups of user %s: %w", name, err)
	}
	for _, g := range groups {
		if n, err := strconv.ParseUint(g, 10, 32); err == nil {
			id.Credential.Groups = append(id.Credential.Groups, uint32(n))
		}
	}
	id.Env = []string{"USER=" + u.Username, "LOGNAME=" + u.Username, "HOME=" + u.HomeDir}
	return id, nil
}
