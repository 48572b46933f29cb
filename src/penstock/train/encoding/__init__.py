"""From what a record says to tokens: text, chats, images."""
